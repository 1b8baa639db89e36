"""Look for bytes that the tap reads differently from whoever stands behind it, for as long as one likes.

    pip install atheris
    python -m scripts.fuzz_wire requests FOLDER -max_total_time=600
    python -m scripts.fuzz_wire responses FOLDER -max_total_time=600

Coverage-guided (atheris, libFuzzer): inputs that reach new code are kept in FOLDER, which begins with the corpus in
``tests/wire/corpus``. What breaks a property is written to ``crash-*``: without its first byte and with a name that
says what it is, it belongs into the corpus. Flags behind FOLDER are libFuzzer's.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["wire", "tap.proxy.relay"]):
    from scripts.wirefuzz.properties import check_requests, check_response

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "wire" / "corpus"


def try_requests(data: bytes) -> None:
    """Try the input as requests; its first byte says where the rest is cut in two."""
    if len(data) > 1:
        check_requests(data[1:], [[data[0]]])


def try_response(data: bytes) -> None:
    """Try the input as a response; its first byte says the cut of the rest, its highest bit HEAD."""
    if len(data) > 1:
        check_response(data[1:], [[data[0] & 0x7F]], method=b"HEAD" if data[0] & 0x80 else b"GET")


KINDS: dict[str, tuple[str, Callable[[bytes], None]]] = {
    "requests": ("request", try_requests),
    "responses": ("response", try_response),
}


def main() -> None:
    """Fill the folder with the corpus and fuzz on from there."""
    if len(sys.argv) < 3 or sys.argv[1] not in KINDS:
        sys.exit(__doc__)
    kind, try_one = KINDS[sys.argv[1]]
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for seed in CORPUS.glob(f"{kind}-*.http"):
        stream = seed.read_bytes()
        (folder / seed.name).write_bytes(bytes([min(len(stream) // 2, 0x7F)]) + stream)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], try_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
