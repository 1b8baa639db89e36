"""A child that tells its parent what it is, and ends with 3."""

import os
import sys
from collections.abc import Sequence

from tests.warmstart import current_umask
from wire.process import parent_socket


def main(argv: Sequence[str]) -> int:
    assert os.getpgrp() == os.getpid()
    with parent_socket(argv) as control:
        control.sendall(
            "\n".join(
                [
                    str(os.getpid()),
                    os.getcwd(),
                    oct(current_umask()),
                    os.environ["PATH"],
                    str(os.getsid(0) == os.getpid()),
                ]
            ).encode()
        )
    return 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
