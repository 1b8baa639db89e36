"""The supervisor's side of the recorder: started with the trace's header, and again where the one before left off."""

import msgspec

from tap.ipc.exchange import EngineChanged, Progress, Ready, RecorderSetup, Refused
from tap.supervisor.account import Ledger
from tap.supervisor.childprocess import ChildProcess
from tap.supervisor.restarting import Keeper
from tracefile.records.schema import Engine

_replies = msgspec.msgpack.Decoder(Ready | Refused | Progress)


class RecorderProcess:
    """The recorder that there is to be; its counts go into the ledger as it tells them."""

    def __init__(self, setup: RecorderSetup, ledger: Ledger) -> None:
        self._setup, self._ledger = setup, ledger
        self.keeper = Keeper(
            "recorder",
            self._start,
            on_message=self._heard,
            on_death=self._died,
            consequence="serving goes on, what cannot be kept until it is back is dropped and counted",
        )

    def engine_changed(self, engine: Engine) -> None:
        """Records from here on are of another engine than the header says."""
        self._setup = msgspec.structs.replace(
            self._setup, meta=msgspec.structs.replace(self._setup.meta, engine=engine)
        )
        self.keeper.send(EngineChanged(engine))

    async def _start(self) -> ChildProcess:
        return await ChildProcess.start("tap.recorder.recorder", self._setup, _replies)

    def _heard(self, progress: Progress) -> None:
        self._ledger.progress = progress

    def _died(self) -> None:
        self._setup = msgspec.structs.replace(self._setup, resume=True, overwrite=False, carry=self._ledger.progress)
