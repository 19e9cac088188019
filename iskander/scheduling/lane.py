"""A lane: one model version's queue, the rules for its batches, and the workers that serve it.

Decisions are made by `policies`, `admission` and `batcher`; here they meet what they are about.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from iskander.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from iskander.config.models import LaneConfig
from iskander.contract.buckets import variants
from iskander.contract.tensors import Contract
from iskander.control.messages import ModelSpec
from iskander.errors import (
    DroppedFromQueue,
    IskanderError,
    ModelQuarantined,
    NotReady,
    QueueFull,
    Superseded,
)
from iskander.measurement.counters import Counters
from iskander.measurement.recent_values import RecentValues
from iskander.scheduling.admission import (
    MISSED,
    RETRY_UNKNOWN_MS,
    Backlog,
    Margin,
    Unreserved,
    expired_error,
    has_place,
    late_error,
    make_way,
    share_error,
)
from iskander.scheduling.arrivals import ArrivalPredictor
from iskander.scheduling.batcher import Formed, Rules, form, make_rules
from iskander.scheduling.cost import LEARNED_SAMPLES, CostModel
from iskander.scheduling.fair_share import QUANTUM_ROWS, BriefRequests, is_brief, slice_rows
from iskander.scheduling.layout import Layout, Layouts
from iskander.scheduling.metrics import LaneMetrics
from iskander.scheduling.policies import make_policy
from iskander.scheduling.queue import WaitingQueue
from iskander.scheduling.request import NEVER_NS, Request

if TYPE_CHECKING:
    from iskander.scheduling.worker_slot import WorkerSlot

Slot = TypeVar("Slot", bound="WorkerSlot")

RETRY_NOT_READY_MS: Final = 500
RETRY_MOST_MS: Final = 60_000
PROBE_NS: Final = NS_PER_S
BRIEF_NS: Final = 100 * NS_PER_US
"""A batch that costs less than this by itself need not wait for others of its turn: a worker that
computes while the gateway reads on is worth more. With a model of 20 us for 128 rows and four
streams it made 1.12 times as many requests a second."""


class Quarantine(NamedTuple):
    """A time in which a model's requests are refused.

    Attributes:
        reason: What its batches did.
        retry_after_ms: How long it lasts.
    """

    reason: str
    retry_after_ms: int


class Lane:
    """One model version.

    Args:
        model: How workers load it.
        config: How requests wait and are put together.
        quorum: Workers that it needs to be called ready.
        recent: Where the last latencies and refusals are kept.

    Attributes:
        contract: None until the first worker has loaded the model.
        workers: That have it loaded and take work, by incarnation.
        ttl_ns: How long a request may wait.
        has_limits: Requests have deadlines or ages that they do not name.
        is_awaiting: A worker is being replaced in order, and requests may wait for the next.
        costs: What batches cost, by worker's index.
        layouts_of: How rows of each bucket lie in the arenas; of a model without any, of all.
        virtual_ns: Time of workers that it has had, divided by its weight; the least is next.
        outstanding: Requests of each client that were admitted and are not answered.
        counts: What came in and went out, by name.
        measures: How long requests and batches took.
        ran_ns: When a worker last ran a batch of it.
        is_served: It is found by those who ask for the model version.
        is_required: Without it the server is not ready.
        is_over: It was served, or should have been, and will not be again.
        is_stale: The files that it was loaded from have changed.
        quarantine: Why its requests are refused, and for how long; None: they are not.
        is_isolated: It was moved to a worker of its own, since its batches ended others.
        refusal: Why a worker could not load it.
        entering: Requests that are for it and wait to be put, or are still being read.
    """

    def __init__(
        self,
        model: ModelSpec,
        config: LaneConfig,
        quorum: int = 1,
        recent: RecentValues | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self._unreserved = Unreserved(config)
        self.quorum = quorum
        self.contract: Contract | None = None
        self.workers: dict[int, WorkerSlot] = {}
        self.is_awaiting = False
        self.ttl_ns = int(config.ttl_ms * NS_PER_MS) or NEVER_NS
        self.has_limits = bool(config.deadline_ms or config.staleness_ms)
        self.cadence = ArrivalPredictor()
        self.costs: dict[int, CostModel] = {}
        self.virtual_ns = 0.0
        self.outstanding: dict[str, int] = {}
        self.counts = Counters()
        self.measures = LaneMetrics(model, recent or RecentValues())
        self.rules = Rules(model.rows_max)
        self._policy = make_policy(config)
        self.queue = WaitingQueue(is_fair=getattr(self._policy, "is_fair", False))
        self.layouts_of: tuple[Layouts, ...] = ()
        self.ran_ns = -PROBE_NS
        self.is_served = self.is_required = True
        self.is_over = self.is_stale = False
        self.refusal: IskanderError | None = None
        self.quarantine: Quarantine | None = None
        self.is_isolated = False
        self.entering = 0
        self._newest: dict[str, Request] = {}
        self._margin = Margin()
        self._number = 0

    def __repr__(self) -> str:
        return (
            f"<Lane {self.title} {len(self.queue)} queued, {len(self.workers)} workers, "
            f"{self.counts['requests']} requests>"
        )

    @property
    def title(self) -> str:
        """Name and version, for people."""
        return f"{self.model.name}/{self.model.version}"

    def pool_of(self, workers: Iterable[Slot]) -> list[Slot]:
        """Those of the plan's workers that are for it."""
        return [worker for worker in workers if worker.pool == self.model.pool]

    @property
    def is_coming(self) -> bool:
        """Whether workers are to load it, and nobody finds it yet."""
        return not self.is_served and not self.is_over

    @property
    def is_empty(self) -> bool:
        """Whether everything that was begun with it has come to its end."""
        return not self.entering and not self.outstanding

    def follow(self, older: Lane) -> None:
        """Take the place of an older lane of the same model version: what is counted goes on."""
        self.counts, self.measures, self.cadence = older.counts, older.measures, older.cadence

    @property
    def ready(self) -> KeysView[int]:
        """Incarnations of the workers that take its batches."""
        return self.workers.keys()

    @property
    def is_ready(self) -> bool:
        """Whether enough warmed workers take its batches now, are not crashing, and it may run."""
        return (
            self.quarantine is None
            and sum(not worker.is_looping for worker in self.workers.values()) >= self.quorum
        )

    @property
    def is_open(self) -> bool:
        """Whether a request would find a worker, now or very soon."""
        return bool(self.workers) or self.is_awaiting

    @property
    def has_idle_worker_for_brief_batches(self) -> bool:
        """Whether a worker has nothing to do, and a batch costs little more than its rows."""
        for worker in self.workers.values():
            if not worker.in_flight and worker.credits:
                cost = self.cost_of(worker)
                return cost.samples >= LEARNED_SAMPLES and cost.base_ns < BRIEF_NS
        return False

    @property
    def layouts(self) -> Layouts:
        """How rows lie in the arenas, of the first bucket; only once there is a contract."""
        return self.layouts_of[0]

    def set_contract(self, contract: Contract) -> None:
        """Take the contract that the first worker compiled."""
        self.contract = contract
        self.layouts_of = tuple(map(Layouts, variants(contract)))
        rules = make_rules(
            self.config, self.model.rows_max, contract.rows_fixed, self._policy.linger_ns
        )
        self.rules = rules._replace(has_shapes=len(self.layouts_of) > 1)

    def layout(self, rows: int) -> Layout:
        """How `rows` rows lie in the arenas."""
        return self.layouts.of(rows)

    def cost_of(self, worker: WorkerSlot) -> CostModel:
        """What a worker's batches cost; where it has run none, what another's do."""
        cost = self.costs.get(worker.index)
        if cost is None:
            cost = self.costs[worker.index] = CostModel()
        if not cost.samples:
            return next((other for other in self.costs.values() if other.samples), cost)
        return cost

    def backlog(self, now_ns: int) -> Backlog:
        """What is before a request that comes now."""
        if not self.workers:
            return Backlog(CostModel(), 0, now_ns)
        first = min(self.workers.values(), key=lambda worker: worker.busy_until_ns)
        return Backlog(self.cost_of(first), len(self.workers), first.busy_until_ns)

    def hear(self, request: Request) -> None:
        """Learn the rhythm of its client, also where the request will be refused.

        Whose requests are too late by themselves is whom a batch is held for.
        """
        if request.terms.is_named and not request.is_part:
            budget_ns = max(request.deadline_ns - request.arrived_ns, 0)
            budget_ns = budget_ns if request.deadline_ns < NEVER_NS else 0
            self.cadence.observe(request.terms.client, request.arrived_ns, budget_ns)

    def require_worker(self) -> None:
        """Refuse what no worker would come to run.

        Raises:
            ModelQuarantined: Its batches ended several workers.
            NotReady: No worker has the model now.
        """
        if self.quarantine is not None:
            raise self.quarantine_error()
        if not self.is_open or self.contract is None:
            raise NotReady(
                f"model `{self.title}` has no ready worker",
                model=self.model.name,
                retry_after_ms=RETRY_NOT_READY_MS,
            )

    def quarantine_error(self) -> ModelQuarantined:
        """The error of a request that meets a quarantine."""
        assert self.quarantine is not None
        return ModelQuarantined(
            f"model `{self.title}` is in quarantine: {self.quarantine.reason}",
            model=self.model.name,
            retry_after_ms=self.quarantine.retry_after_ms,
        )

    def require_open(self, request: Request, now_ns: int) -> None:
        """Refuse a request that would find no worker, no place, or not enough time.

        Raises:
            ModelQuarantined: Its batches ended several workers.
            NotReady: No worker has the model now.
            ClientOverShare: Its client has too many outstanding.
            DeadlineExceeded: Its time has passed.
            DeadlineUnreachable: It could not be done in time.
            QueueFull: There is no place, and nobody in the queue has to give way to it.
        """
        # Step 3
        self.require_worker()
        error: IskanderError | None = None
        if not request.is_part:
            outstanding = self.outstanding.get(request.terms.client, 0)
            error = share_error(outstanding, self.config, request)
        if error is None and request.expires_ns <= now_ns:
            error = expired_error(request, now_ns)
        if error is None and request.deadline_ns < NEVER_NS and self._may_refuse(now_ns):
            request.rank = self._policy.rank(request, 0)
            error = late_error(
                self.queue,
                self.rules,
                request,
                self.backlog(now_ns),
                now_ns=now_ns,
                margin=self._margin.share,
            )
            self._margin.learn(is_late=error is not None)
        if error is None and not has_place(self.queue, self.config, self._unreserved, request):
            way = make_way(self.queue, self.config, request, self._older(request), self.title)
            error = way if isinstance(way, QueueFull) else None
        if error is not None:
            if error.retryable and error.retry_after_ms is None:
                error.retry_after_ms = self.retry_after_ms(now_ns)
            if error.code in MISSED:
                self.count_missed(request)
            self.counts[f"refused.{error.code}"] += 1
            raise error

    def count_missed(self, request: Request) -> None:
        """Count the deadline of a request that is refused, where it has one."""
        if request.deadline_ns < NEVER_NS:
            self.counts["deadline.missed"] += 1

    def put(self, request: Request, now_ns: int) -> list[tuple[Request, IskanderError]]:
        """Queue an admitted request.

        Returns:
            Those that had to leave the queue for it, and why; they are out of it already.
        """
        # Step 4
        self._number += 1
        request.number = self._number
        request.queued_ns = now_ns
        terms = request.terms
        self.counts["requests"] += 1
        self.counts["rows"] += request.rows
        self.outstanding[terms.client] = self.outstanding.get(terms.client, 0) + 1
        period_ns = self.cadence.period_ns(terms.client) if terms.is_named else 0
        request.rank = self._policy.rank(request, period_ns)
        older = self._older(request)
        way: list[Request] | QueueFull = []
        if not has_place(self.queue, self.config, self._unreserved, request):
            way = make_way(self.queue, self.config, request, older, self.title)
        assert not isinstance(way, QueueFull), "it was admitted in this turn of the loop"
        removed: list[tuple[Request, IskanderError]] = []
        if older is not None:
            if older.waiting_rows == older.rows:
                # In its place, or a client that sends fast would never come to its turn.
                request.rank = min(request.rank, older.rank)
            self.queue.remove(older)
            removed.append((older, Superseded("a newer request of its client took its place")))
        if self._is_newest_kept(request):
            self._newest[terms.client] = request
        for victim in way:
            self.queue.remove(victim)
            error = DroppedFromQueue(
                f"the queue of model `{self.title}` was full and gave its place to another",
                retry_after_ms=self.retry_after_ms(now_ns),
            )
            removed.append((victim, error))
        self._policy.on_put(request)
        self.queue.put(request)
        return removed

    def put_back(self, request: Request, now_ns: int) -> None:
        """Let a request wait anew whose rows came back from a worker; `todo` is set."""
        self._number += 1
        request.number = self._number
        self.measures.on_put_back(request, now_ns)
        request.wait_anew(now_ns)
        self.queue.put(request)

    def is_brief(self, request: Request) -> bool:
        """Whether a request costs little, as far as that is known."""
        for cost in self.costs.values():
            return is_brief(cost, self.rules.run_rows(request.rows))
        return False

    def form(self, worker: WorkerSlot, now_ns: int, brief: BriefRequests | None = None) -> Formed:
        """The next batch for a worker."""
        cost = self.cost_of(worker)
        free_ns = worker.busy_until_ns if worker.in_flight else 0
        rules = self.rules
        if not self._may_refuse(now_ns):
            rules = rules._replace(may_doom=False)
        return form(
            self.queue,
            rules,
            cost,
            now_ns=now_ns,
            free_ns=free_ns,
            expected=self.cadence.expected(now_ns) if len(self.cadence) else (),
            brief=brief,
        )

    def take(self, request: Request, rows: int) -> tuple[int, int]:
        """Take rows of a waiting request for a batch: the first of them, and how many."""
        self._policy.on_taken(request)
        return self.queue.take(request, rows)

    def on_sent(self, rows: int, waits_ns: list[int], now_ns: int) -> None:
        """Measure a batch that goes to a worker, and how long each of its requests has waited."""
        self.counts["batches"] += 1
        self.measures.on_sent(rows, waits_ns, self.queue.requests, now_ns)

    def on_ran(self, worker: WorkerSlot, rows: int, run_ns: int, now_ns: int) -> None:
        """Measure and learn from a batch that was run."""
        self.ran_ns = now_ns
        self.measures.run_ns.record(run_ns)
        cost = self.costs[worker.index]
        cost.observe(rows, run_ns)
        self.queue.shares.quantum_rows = slice_rows(cost) or QUANTUM_ROWS

    def on_completed(self, request: Request, run_ns: int, now_ns: int) -> None:
        """Measure a request that has its results, the last of which a batch of `run_ns` gave."""
        counts = self.counts
        counts["completed"] += 1
        if request.deadline_ns < NEVER_NS:
            counts["deadline.hit" if now_ns <= request.deadline_ns else "deadline.missed"] += 1
        self.measures.on_completed(request, run_ns, now_ns)

    def catch_up(self) -> None:
        """Start level with the rest where nothing waits: idle time is not saved up."""
        least: WorkerSlot | None = None
        for worker in self.workers.values():
            if least is None or worker.virtual_ns < least.virtual_ns:
                least = worker
        if least is not None:
            self.virtual_ns = max(self.virtual_ns, least.virtual_ns)

    def retire(self, request: Request) -> None:
        """Count a request no longer; once for each that was put."""
        client = request.terms.client
        left = self.outstanding[client] - 1
        if left:
            self.outstanding[client] = left
        else:
            del self.outstanding[client]
        if self._newest.get(client) is request:
            del self._newest[client]
        if not request.sent_ns:
            self._policy.on_left(request)

    def retry_after_ms(self, now_ns: int) -> int:
        """When the queue will have drained by half, as far as the cost is known."""
        backlog = self.backlog(now_ns)
        drain_ns = backlog.drain_ns(self.rules, max(self.queue.rows // 2, 1))
        return min(max(drain_ns // NS_PER_MS, 1), RETRY_MOST_MS) if drain_ns else RETRY_UNKNOWN_MS

    def _may_refuse(self, now_ns: int) -> bool:
        """Whether what batches cost is known well enough to refuse by it.

        Where everything is refused nothing is learned any more, so after a while without a run
        requests are let in again.
        """
        return self.config.refuse_late and now_ns - self.ran_ns < PROBE_NS

    def _older(self, request: Request) -> Request | None:
        """The waiting request whose place a newer one of its client takes.

        Of a batch in parts it is the last, and with it goes the batch; a part takes nobody's place.
        """
        if request.is_part or not self._is_newest_kept(request):
            return None
        older = self._newest.get(request.terms.client)
        return older if older is not None and older.is_waiting else None

    def _is_newest_kept(self, request: Request) -> bool:
        return request.terms.is_newest_wins or self.config.newest_wins
