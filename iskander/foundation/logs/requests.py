"""Events of single requests: those that failed by a fault of the server."""

from __future__ import annotations

from iskander.foundation.logs.event import Source

dispatch = Source("iskander.dispatch")
policies = Source("iskander.policies")
metrics = Source("iskander.metrics")
submit = Source("iskander.submit")
grpc = Source("iskander.grpc")
flight = Source("iskander.flight")
oip = Source("iskander.oip")
http = Source("iskander.http")
inferential = Source("iskander.inferential")


@dispatch.error("model", "client")
def request_lost(*, model: str, rows: int, client: str, reason: str) -> str:
    """A request was rejected because workers ended while they had it.

    Do: Read the worker's lines before it; the request itself may be the cause.
    """
    return f"request of {rows} rows for {model} of client `{client}` failed: {reason}"


@dispatch.error("model")
def result_copy_failed(*, model: str, error: BaseException) -> str:
    """Results could not be copied out of a worker's memory.

    Do: Report a bug with the traceback.
    """
    return f"copying the results for {model} failed"


@dispatch.error("model")
def result_delivery_failed(*, model: str, error: BaseException) -> str:
    """Results could not be passed to the protocol that waits for them.

    Do: Report a bug with the traceback.
    """
    return f"delivering the results of a request for {model} failed"


@dispatch.error("model")
def error_delivery_failed(*, model: str, error: BaseException) -> str:
    """An error could not be passed to the protocol that waits for it.

    Do: Report a bug with the traceback.
    """
    return f"delivering an error of a request for {model} failed"


@policies.error()
def scoring_function_failed(*, error: BaseException) -> str:
    """The scoring function of an embedding program raised an exception; logged once.

    Do: Correct the function.
    """
    return "a scoring function failed; its requests get the score 0"


@policies.error("policy")
def policy_failed(*, policy: str, error: BaseException) -> str:
    """A scheduling policy of an installed package raised an exception; logged once.

    Do: Correct the policy; the traceback has the cause.
    """
    return f"policy `{policy}` failed; requests without a rank run by arrival"


@metrics.error("metric")
def metric_callback_failed(*, metric: str, error: BaseException) -> str:
    """A callback of an embedding program raised an exception; logged once.

    Do: Correct the callback.
    """
    return f"metric callback failed for `{metric}`"


@submit.error("model")
def admission_failed(*, model: str, rows: int, error: BaseException) -> str:
    """The admission of a request of a tensor protocol raised an exception.

    Do: Report a bug with the traceback.
    """
    return f"internal error in the admission of a request of {rows} rows for {model}"


@grpc.error()
def call_raised(*, error: BaseException) -> str:
    """A gRPC call raised an exception; its client gets the error `internal`.

    Do: Report a bug with the traceback.
    """
    return "internal error in a call"


@grpc.warning("code")
def call_failed(*, code: str, reason: str) -> str:
    """A gRPC call failed by a fault of the server.

    Do: See the code on the errors page.
    """
    return f"call failed with {code}: {reason}"


@flight.error("stage")
def stream_failed(*, stage: str, error: BaseException) -> str:
    """A DoExchange stream raised an exception; its client gets an error.

    Do: Report a bug with the traceback.
    """
    return f"stream: {stage} failed"


@oip.error()
def inference_stream_failed(*, error: BaseException) -> str:
    """A request of a ModelStreamInfer stream raised an exception.

    Do: Report a bug with the traceback.
    """
    return "request of a stream failed"


@http.warning("code")
def http_request_failed(*, code: str, reason: str) -> str:
    """An HTTP request failed by a fault of the server.

    Do: See the code on the errors page.
    """
    return f"request failed with {code}: {reason}"


@inferential.error()
def observation_failed(*, error: BaseException) -> str:
    """An observation of the Inferential protocol raised an exception.

    Do: Report a bug with the traceback.
    """
    return "internal error in an observation"


@inferential.error()
def observation_admission_failed(*, error: BaseException) -> str:
    """The admission of an observation of the Inferential protocol raised an exception.

    Do: Report a bug with the traceback.
    """
    return "internal error in the admission of an observation"
