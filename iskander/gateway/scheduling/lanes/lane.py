"""Lane: one model version's queue, contract, batching rules, cost models and workers.

Decisions are made in `policies`, `admission` and `batcher`; the lane applies them.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from iskander.config.models import LaneConfig
from iskander.contract.processing.buckets import contracts_of_buckets
from iskander.contract.processing.row_relation import INDEPENDENT, RowRelation, weaker_relation
from iskander.contract.runtime import Runtime
from iskander.contract.tensors import Contract
from iskander.errors import (
    Cancelled,
    ContractError,
    DroppedFromQueue,
    IskanderError,
    LimitExceeded,
    ModelMoved,
    ModelQuarantined,
    NotReady,
    QueueFull,
    RemoteUnavailable,
    Superseded,
)
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from iskander.foundation.measurement.counters import Counters
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.scheduling.lanes.admission import (
    MISSED,
    RETRY_UNKNOWN_MS,
    Backlog,
    Margin,
    Unreserved,
    doomed_error,
    expired_error,
    late_error,
    select_victims,
    share_error,
)
from iskander.gateway.scheduling.lanes.arrivals import ArrivalPredictor
from iskander.gateway.scheduling.lanes.batcher import Formed, Rules, form, make_rules
from iskander.gateway.scheduling.lanes.cost import LEARNED_SAMPLES, CostModel
from iskander.gateway.scheduling.lanes.fair_share import (
    QUANTUM_ROWS,
    BriefRequests,
    is_brief,
    slice_rows,
)
from iskander.gateway.scheduling.lanes.layout import Layout, LayoutCache
from iskander.gateway.scheduling.lanes.metrics import LaneMetrics
from iskander.gateway.scheduling.lanes.offenders import Offenders
from iskander.gateway.scheduling.lanes.policies import make_policy
from iskander.gateway.scheduling.lanes.queue import WaitingQueue
from iskander.gateway.scheduling.request import NEVER_NS, Request
from iskander.interprocess.control.messages import ModelSpec

if TYPE_CHECKING:
    from iskander.gateway.scheduling.worker_slot import WorkerSlot

Slot = TypeVar("Slot", bound="WorkerSlot")

RETRY_NOT_READY_MS: Final = 500
RETRY_OUTAGE_MS: Final = 1000
"""The interval of the checks of a remote server during an outage."""
RETRY_MOST_MS: Final = 60_000
PROBE_NS: Final = NS_PER_S
BRIEF_NS: Final = 100 * NS_PER_US
NO_VICTIMS: Final[list[Request]] = []
"""Of a request that fits in its queue; not changed."""
"""A batch with a lower fixed cost is sent without waiting for other requests of the same loop
iteration, so that the worker computes while the gateway reads. With a model of 20 us for 128 rows
and four streams, the throughput was 1.12 times as high."""


class Quarantine(NamedTuple):
    """Why all requests for a model are rejected, and for how long."""

    reason: str
    retry_after_ms: int


class Lane:
    """The queue of one model version with its contract, cost models and workers.

    Attributes:
        has_both_kinds: Workers with and without a GPU may load the model.
        quorum: Number of workers at which the model is ready.
        contract: None until the first worker has loaded the model.
        relation: Whether the rows of the model affect each other's results.
        runtimes: What computes its batches, of all workers that have loaded the model.
        files_sha256: Hash of the model's files when the first worker loaded them; empty if unknown.
        workers: Workers with the model loaded that accept batches, by incarnation.
        has_limits: The settings limit the latency or age of requests that name no limit.
        is_awaiting_worker: A worker is being recycled; requests may wait for its replacement.
        costs: Cost models by worker index.
        layouts_by_bucket: One entry for a model without buckets.
        virtual_ns: Worker time used, divided by the weight; the lane with the least is next.
        outstanding: Number of admitted, unanswered requests of each client.
        ran_ns: End of the latest run.
        is_served: New requests for the model version are routed here.
        is_required: The server is ready only if the lane is.
        is_retired: It was replaced or unloaded, or failed to load, and is not served again.
        is_stale: The model files have changed since it was loaded.
        quarantine: Quarantine in force; None: requests are accepted.
        outage: Why the remote server of the model cannot be reached; empty if it can.
        absence: Why none of its workers can run, such as a lost GPU; empty if one can.
        unreachable: Consecutive batches that failed because the remote server was not reached.
        is_isolated: It runs in a dedicated worker, because its batches crashed others.
        is_held: No batch is sent until the exit of a worker that ran one is explained.
        offenders: Sources whose requests ended workers.
        refusal: Error of a worker that could not load the model.
        entering: Number of requests before the queue: being read, or waiting for arena memory.
    """

    def __init__(
        self,
        model: ModelSpec,
        config: LaneConfig,
        quorum: int = 1,
        recent: RecentValues | None = None,
    ) -> None:
        self.model = model
        self.has_both_kinds = len(model.devices) > 1
        self.quorum = quorum
        self.contract: Contract | None = None
        self.relation = INDEPENDENT
        self.files_sha256 = ""
        self.runtimes: tuple[Runtime, ...] = ()
        self.workers: dict[int, WorkerSlot] = {}
        self.is_awaiting_worker = False
        self.arrivals = ArrivalPredictor()
        self.costs: dict[int, CostModel] = {}
        self.virtual_ns = 0.0
        self.outstanding: dict[str, int] = {}
        self.counts = Counters()
        self.metrics = LaneMetrics(model, recent or RecentValues())
        self.rules = Rules(model.rows_max)
        self._policy = make_policy(config)
        self.configure(config)
        self.queue = WaitingQueue(is_fair=getattr(self._policy, "is_fair", False))
        self.layouts_by_bucket: tuple[LayoutCache, ...] = ()
        self.ran_ns = -PROBE_NS
        self.is_served = self.is_required = True
        self.is_retired = self.is_stale = self.is_isolated = self.is_held = False
        self.offenders = Offenders()
        self.refusal: IskanderError | None = None
        self.quarantine: Quarantine | None = None
        self.outage = self.absence = ""
        self.unreachable = 0
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
        """Name and version for messages."""
        return f"{self.model.name}/{self.model.version}"

    def is_for(self, worker: WorkerSlot) -> bool:
        """Whether a worker loads the model: it has the pool and one of the devices of the model."""
        return worker.pool == self.model.pool and worker.device in self.model.devices

    def pool_workers(self, workers: Iterable[Slot]) -> list[Slot]:
        """The workers that load the model."""
        return [worker for worker in workers if self.is_for(worker)]

    @property
    def is_pending(self) -> bool:
        """Whether the model is being loaded and not served yet."""
        return not self.is_served and not self.is_retired

    @property
    def is_empty(self) -> bool:
        """Whether no request is outstanding or about to be queued."""
        return not self.entering and not self.outstanding

    def inherit(self, older: Lane) -> None:
        """Continue the counters and predictions of an older lane of the same model version."""
        self.counts, self.metrics, self.arrivals = older.counts, older.metrics, older.arrivals

    @property
    def ready(self) -> KeysView[int]:
        """Incarnations of the workers that accept batches."""
        return self.workers.keys()

    @property
    def is_ready(self) -> bool:
        """Whether a quorum of stable workers accepts batches, without quarantine or outage."""
        return (
            self.quarantine is None
            and not self.outage
            and sum(not worker.is_looping for worker in self.workers.values()) >= self.quorum
        )

    @property
    def is_open(self) -> bool:
        """Whether a worker serves the lane, or its replacement is awaited."""
        return bool(self.workers) or self.is_awaiting_worker

    @property
    def has_idle_worker_for_brief_batches(self) -> bool:
        """Whether a worker is idle and the fixed cost of a batch is negligible."""
        for worker in self.workers.values():
            if not worker.in_flight and worker.credits:
                cost = self.cost_of(worker)
                return cost.samples >= LEARNED_SAMPLES and cost.base_ns < BRIEF_NS
        return False

    @property
    def layouts(self) -> LayoutCache:
        """Arena layouts of the first bucket; requires a contract."""
        return self.layouts_by_bucket[0]

    def configure(self, config: LaneConfig) -> None:
        """Apply the settings, except those of the policy; a queued request keeps its expiry."""
        self.config = config
        self._unreserved = Unreserved(config)
        self.ttl_ns = int(config.ttl_ms * NS_PER_MS) or NEVER_NS
        self.has_limits = bool(config.deadline_ms or config.staleness_ms)
        if self.contract is not None:
            self._make_rules(self.contract)

    def set_contract(self, contract: Contract, relation: RowRelation = INDEPENDENT) -> None:
        """Apply the contract that the first worker compiled, and its measurement of the rows."""
        self.relation = relation
        # Last, because it may raise for the contract of a faulty worker.
        self.layouts_by_bucket = tuple(map(LayoutCache, contracts_of_buckets(contract)))
        self._make_rules(contract)
        self.contract = contract

    def weaken_relation(self, relation: RowRelation) -> None:
        """Apply the measurement of another worker, if it permits less."""
        self.relation = weaker_relation(self.relation, relation)
        assert self.contract is not None
        self._make_rules(self.contract)

    def _make_rules(self, contract: Contract) -> None:
        rules = make_rules(
            self.config,
            self.model.rows_max,
            contract.rows_fixed,
            self._policy.linger_ns,
            self.relation,
        )
        self.rules = rules._replace(has_shapes=len(self.layouts_by_bucket) > 1)

    def layout(self, rows: int) -> Layout:
        """Arena layout of a number of rows."""
        return self.layouts.for_rows(rows)

    def cost_of(self, worker: WorkerSlot) -> CostModel:
        """Cost model of a worker; until its first run, that of another worker."""
        cost = self.costs.get(worker.index)
        if cost is None:
            cost = self.costs[worker.index] = CostModel()
        if not cost.samples:
            return next((other for other in self.costs.values() if other.samples), cost)
        return cost

    def backlog(self, now_ns: int) -> Backlog:
        """Work ahead of a new request."""
        if not self.workers:
            return Backlog(CostModel(), 0, now_ns)
        first = min(self.workers.values(), key=lambda worker: worker.busy_until_ns)
        return Backlog(self.cost_of(first), len(self.workers), first.busy_until_ns)

    def observe_arrival(self, request: Request) -> None:
        """Learn the arrival rhythm of a client, also from requests that are rejected later."""
        if request.terms.is_named and not request.is_part:
            budget_ns = max(request.deadline_ns - request.arrived_ns, 0)
            budget_ns = budget_ns if request.deadline_ns < NEVER_NS else 0
            self.arrivals.observe(request.terms.client, request.arrived_ns, budget_ns)

    def require_worker(self) -> None:
        """Raise an error if no worker would run a request.

        Raises:
            ModelQuarantined: The model is in quarantine.
            RemoteUnavailable: Its remote server cannot be reached.
            NotReady: It has no worker.
        """
        if self.quarantine is not None:
            raise self.quarantine_error()
        if self.outage:
            raise self.outage_error()
        if not self.is_open or self.contract is None:
            reason = f": {self.absence}" if self.absence else ""
            raise NotReady(
                f"model `{self.title}` has no ready worker{reason}",
                model=self.model.name,
                retry_after_ms=RETRY_NOT_READY_MS,
            )

    def quarantine_error(self) -> ModelQuarantined:
        """The error of a request during a quarantine."""
        assert self.quarantine is not None
        return ModelQuarantined(
            f"model `{self.title}` is in quarantine: {self.quarantine.reason}",
            model=self.model.name,
            retry_after_ms=self.quarantine.retry_after_ms,
        )

    def outage_error(self) -> RemoteUnavailable:
        """The error of a request during an outage of the remote server."""
        return RemoteUnavailable(self.outage, model=self.model.name, retry_after_ms=RETRY_OUTAGE_MS)

    def whole_error(self, rows: int, *, is_cut: bool = False) -> IskanderError | None:
        """The error of a request that cannot be one run with exactly its rows; None if it can.

        For a lane whose rules are `is_whole`. `is_cut`: the request was cut from a larger one.
        """
        assert self.contract is not None
        rows_fixed, reason = self.contract.rows_fixed, self.relation.reason
        if is_cut:
            return self.cut_error()
        if rows_fixed is not None and rows != rows_fixed:
            return ContractError(
                f"model `{self.title}` takes exactly {rows_fixed} rows in each request, got "
                f"{rows}: its first axis is fixed, and {reason}",
                model=self.model.name,
                wanted=rows_fixed,
                got=rows,
            )
        if rows > self.rules.rows_max:
            return LimitExceeded(
                f"a request for model `{self.title}` runs as a whole and has {rows:,} rows, limit "
                f"{self.rules.rows_max:,} (`models.max_batch_rows`); {reason}. Send fewer rows, "
                "raise the limit, or set `combine = true` in the manifest if the rows are known "
                "to be independent",
                model=self.model.name,
                wanted=self.rules.rows_max,
                got=rows,
            )
        return None

    def cut_error(self) -> ModelMoved:
        """The error of a request that was cut before its lane's rules became `is_whole`."""
        problem = "was cut before its rows were known to depend on each other; send it again"
        return ModelMoved(f"a request for model `{self.title}` {problem}", retry_after_ms=0)

    def cut_table_error(self) -> ContractError:
        """The error of a batch that is a part of a table, of a lane whose rules are `is_whole`."""
        return ContractError(
            f"a request for model `{self.title}` must have all rows of its table, and the client "
            f"has cut the table: {self.relation.reason}. Repeat the call, so that the client reads "
            "the model's contract again; if the served versions differ, name a version",
            model=self.model.name,
        )

    def require_rows_optional(self) -> None:
        """Raise an error if each request needs a fixed number of rows, and so cannot be empty."""
        error = self.whole_error(0) if self.rules.is_whole else None
        if error is not None:
            raise error

    def check(self, request: Request, now_ns: int) -> list[Request]:
        """Rank a request, or reject it if it cannot be queued or cannot complete in time.

        Returns:
            The queued requests that `put` evicts for it in the same iteration of the event loop.

        Raises:
            IskanderError: From `require_worker`, `Offenders.error`, `whole_error`, `share_error`,
                `expired_error`, `late_error` or `select_victims`.
        """
        # Step 3
        self.require_worker()
        error: IskanderError | None = None
        victims: list[Request] | QueueFull = NO_VICTIMS
        if len(self.offenders):
            error = self.offenders.error(request.terms.source, now_ns, self.title)
        if error is None and self.rules.is_whole:
            error = self.whole_error(request.rows, is_cut=request.is_cut)
        if error is None and not request.is_part:
            outstanding = self.outstanding.get(request.terms.client, 0)
            error = share_error(outstanding, self.config, request)
        if error is None and request.expires_ns <= now_ns:
            error = expired_error(request, now_ns)
        if error is None:
            self.rank(request)
        if error is None and request.deadline_ns < NEVER_NS and self._may_reject_late(now_ns):
            backlog, margin = self.backlog(now_ns), self._margin.share
            error = late_error(
                self.queue, self.rules, request, backlog, now_ns=now_ns, margin=margin
            )
            self._margin.learn(is_late=error is not None)
        if error is None and not self._unreserved.fits(self.queue, request):
            older = self._older(request)
            victims = select_victims(self.queue, self.config, request, older, self.title)
            error = victims if isinstance(victims, QueueFull) else None
        if error is not None:
            self.add_retry_hint(error, now_ns)
            self.count_rejected(request, error)
            raise error
        assert not isinstance(victims, QueueFull)
        return victims

    def rank(self, request: Request) -> None:
        """Set the rank of a request by the lane's policy."""
        terms = request.terms
        period_ns = self.arrivals.period_ns(terms.client) if terms.is_named else 0
        request.rank = self._policy.rank(request, period_ns)

    def add_retry_hint(self, error: IskanderError, now_ns: int) -> None:
        """Set the time after which a retry can succeed, if the error has none."""
        if error.retryable and error.retry_after_ms is None:
            error.retry_after_ms = self.retry_after_ms(now_ns)

    def count_refused(self, error: IskanderError) -> None:
        """Count a request that its protocol rejects, unless a step before has counted it.

        For errors in its content, which protocols find before `check`. A request whose caller is
        gone is withdrawn, not refused.
        """
        if not error.is_counted and error.code != Cancelled.code:
            error.is_counted = True
            self.counts[f"refused.{error.code}"] += 1

    def count_rejected(self, request: Request, error: IskanderError, how: str = "refused") -> None:
        """Count a rejected or failed request; `how` is the prefix of the counter."""
        error.is_counted = True
        self.counts[f"{how}.{error.code}"] += 1
        if error.code in MISSED:
            self.count_missed(request)

    def count_missed(self, request: Request) -> None:
        """Count the missed deadline of a rejected request, if it has one."""
        if request.deadline_ns < NEVER_NS:
            self.counts["deadline.missed"] += 1

    def put(
        self, request: Request, now_ns: int, victims: list[Request]
    ) -> list[tuple[Request, IskanderError]]:
        """Queue a checked request; returns the requests removed for it, and their errors."""
        # Step 5
        self._number += 1
        request.number = self._number
        request.queued_ns = now_ns
        terms = request.terms
        if len(self.offenders) and self.offenders.is_known(terms.source, now_ns):
            request.is_alone = True
        self.counts["requests"] += 1
        self.counts["rows"] += request.rows
        self.outstanding[terms.client] = self.outstanding.get(terms.client, 0) + 1
        older = self._older(request)
        removed: list[tuple[Request, IskanderError]] = []
        if older is not None:
            if older.waiting_rows == older.rows:
                # Keeps the rank, or a client that sends fast would starve.
                request.rank = min(request.rank, older.rank)
            self.queue.remove(older)
            removed.append((older, Superseded("replaced by a newer request of the same client")))
        if self._is_newest_wins(request):
            self._newest[terms.client] = request
        for victim in victims:
            self.queue.remove(victim)
            error = DroppedFromQueue(
                f"evicted from the full queue of model `{self.title}` by another request "
                "(`lanes.overflow`)",
                retry_after_ms=self.retry_after_ms(now_ns),
            )
            removed.append((victim, error))
        self._policy.on_put(request)
        self.queue.put(request)
        return removed

    def put_back(self, request: Request, now_ns: int) -> None:
        """Queue a request again for a retry; `todo` has the rows that came back without results."""
        self._number += 1
        request.number = self._number
        self.metrics.on_put_back(request, now_ns)
        request.restart_wait(now_ns)
        self.queue.put(request)

    def is_brief(self, request: Request) -> bool:
        """Whether a request costs little; False until the cost is learned."""
        for cost in self.costs.values():
            return is_brief(cost, self.rules.run_rows(request.rows))
        return False

    def form(self, worker: WorkerSlot, now_ns: int, brief: BriefRequests | None = None) -> Formed:
        """Form the next batch for a worker."""
        rules = self.rules
        if not self._may_reject_late(now_ns):
            rules = rules._replace(may_doom=False)
        formed = form(
            self.queue,
            rules,
            self.cost_of(worker),
            now_ns=now_ns,
            free_ns=worker.busy_until_ns if worker.in_flight else 0,
            expected=self.arrivals.expected(now_ns) if len(self.arrivals) else (),
            brief=brief,
        )
        if rules.is_whole and formed.picks:
            request = formed.picks[0][0]
            if self.whole_error(request.rows, is_cut=request.is_cut) is not None:
                # It was queued before the measurement of another worker changed the rules.
                formed = msgspec.structs.replace(formed, doomed=[*formed.doomed, request])
        return formed

    def doomed_error(self, request: Request, now_ns: int) -> IskanderError:
        """The error of a queued request in `Formed.doomed`."""
        error = None
        if self.rules.is_whole:
            error = self.whole_error(request.rows, is_cut=request.is_cut)
        return error or doomed_error(request, now_ns)

    def take(self, request: Request, rows: int) -> tuple[int, int]:
        """Take rows of a queued request for a batch; returns the first row and the count."""
        self._policy.on_taken(request)
        return self.queue.take(request, rows)

    def on_sent(self, rows: int, waits_ns: list[int], now_ns: int) -> None:
        """Record a batch that goes to a worker, and the wait of each of its requests."""
        self.counts["batches"] += 1
        self.metrics.on_sent(rows, waits_ns, self.queue.requests, now_ns)

    def on_ran(self, worker: WorkerSlot, rows: int, run_ns: int, now_ns: int) -> None:
        """Record a run and learn its cost."""
        self.ran_ns = now_ns
        self.unreachable = 0
        self.metrics.run_ns.record(run_ns)
        cost = self.costs[worker.index]
        cost.observe(rows, run_ns)
        self.queue.shares.quantum_rows = slice_rows(cost) or QUANTUM_ROWS

    def on_completed(self, request: Request, run_ns: int, now_ns: int) -> None:
        """Record a completed request; `run_ns` is the run time of its last batch."""
        counts = self.counts
        counts["completed"] += 1
        if request.deadline_ns < NEVER_NS:
            counts["deadline.hit" if now_ns <= request.deadline_ns else "deadline.missed"] += 1
        self.metrics.on_completed(request, run_ns, now_ns)

    def catch_up(self) -> None:
        """Raise the virtual time of an empty lane, so that it saves up no idle time."""
        least = -1.0
        for worker in self.workers.values():
            if least < 0 or worker.virtual_ns < least:
                least = worker.virtual_ns
        self.virtual_ns = max(self.virtual_ns, least)

    def retire(self, request: Request) -> None:
        """Remove a finished request from the outstanding ones; once for each `put`."""
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
        """Predicted time until half of the queue has drained."""
        backlog = self.backlog(now_ns)
        rows, requests = max(self.queue.rows // 2, 1), max(self.queue.requests // 2, 1)
        drain_ns = backlog.drain_ns(self.rules, rows, requests)
        return min(max(drain_ns // NS_PER_MS, 1), RETRY_MOST_MS) if drain_ns else RETRY_UNKNOWN_MS

    def _may_reject_late(self, now_ns: int) -> bool:
        """Whether late requests may be rejected: `refuse_late` is set and the cost is recent.

        After `PROBE_NS` without a run, requests are admitted again, so that the cost is measured.
        """
        return self.config.refuse_late and now_ns - self.ran_ns < PROBE_NS

    def _older(self, request: Request) -> Request | None:
        """The queued request that a newer one of the same client replaces.

        A part replaces nothing. Of a batch in several parts, only the last part is replaced.
        """
        if request.is_part or not self._is_newest_wins(request):
            return None
        older = self._newest.get(request.terms.client)
        return older if older is not None and older.is_waiting else None

    def _is_newest_wins(self, request: Request) -> bool:
        return request.terms.is_newest_wins or self.config.newest_wins
