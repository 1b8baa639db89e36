"""Prefill and decode workers: a request runs on one to its first token, then on one of the others with its KV."""

from engines.routing.router import Router
from sim.engine.dispatch import Dispatch, RoutedLoad
from sim.engine.fleet import Fleet
from sim.kernels.layout import NONE
from sim.kernels.routing import FIRST_TOKEN


class WorkerDispatch(Dispatch):
    """A run of workers, the prefill workers first. The one router chooses among these, ``decode`` among the others."""

    def __init__(self, fleet: Fleet, load: RoutedLoad, router: Router, decode: Router) -> None:
        super().__init__(fleet, load, router)
        self._prefill, self._decode = router, decode
        self._prefill_workers = sum(engine.role == "prefill" for engine in fleet.engines)

    def _tell(self) -> None:
        for time_ms, code in self.fleet.told():
            place, router = code >> 1, self._decode
            if self.engine_of[place] < self._prefill_workers:
                router = self._prefill
            if code & 1 == FIRST_TOKEN:
                router.first_token(self._number_of[place])
            else:
                router.ended(self._number_of[place], time_ms / 1e3)

    def _send(self, place: int) -> int:
        fleet, before = self.fleet, self.engine_of[place]
        router = self._prefill if before == NONE else self._decode
        if before != NONE:
            self._prefill.first_token(self._number_of[place])
            self._prefill.ended(self._number_of[place], fleet.now_ms / 1e3)
        request = self.load.request(place, self._chosen, fleet.now_ms)
        engine = router.choose(request)
        router.sent(request, engine)
        self._number_of[place] = self._chosen
        self._chosen += 1
        if before != NONE:
            engine += self._prefill_workers
            fleet.forward(place, before, engine)
        self.engine_of[place] = engine
        return fleet.advance(place, engine)
