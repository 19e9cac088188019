"""Events of the observation of requests: the observer process and its consumers of samples."""

from __future__ import annotations

from iskander.foundation.logs.event import Source

observation = Source("iskander.observation")
observer = Source("iskander.observer")
drift = Source("iskander.drift")


@observation.error()
def observer_ended(*, exit_code: int) -> str:
    """The observer process ended and is started again; samples on their way to it are lost.

    Do: Read its own lines before this one. If there are none, check the memory of the machine.
    """
    return f"the observer process ended with {exit_code}; it is started again"


@observation.error()
def observer_not_started(*, reason: str) -> str:
    """The observer process cannot be started; the gateway tries again.

    Do: Check the limits of processes and memory.
    """
    return f"the observer process cannot be started: {reason}"


@observation.error()
def observer_message_invalid(*, reason: str) -> str:
    """The observer process sent an invalid message.

    It is started again, unless the message was a report of drift.

    Do: Report a bug. If the installation was updated, restart the server.
    """
    return f"invalid message of the observer process: {reason}"


@observation.error()
def observer_hung(*, silent_s: int) -> str:
    """The observer process sent no report; it is killed and started again.

    Do: Check the disk of the prediction log for reads and writes that do not end.
    """
    return f"the observer process sent no report for {silent_s} s; it is killed"


@observation.warning()
def observer_killed(*, stop_s: float) -> str:
    """The observer process did not complete its files at the stop of the gateway.

    Do: Check the disk of the prediction log.
    """
    return f"the observer process did not end in {stop_s:g} s; it is killed"


@observation.error("consumer")
def consumer_failing(*, consumer: str, reason: str) -> str:
    """A consumer of samples, such as the prediction log, cannot do its work.

    Do: Correct the reason; the consumer goes on by itself.
    """
    return f"{consumer}: {reason}"


@observation.info("consumer")
def consumer_recovered(*, consumer: str) -> str:
    """A consumer of samples works again."""
    return f"{consumer}: works again"


@observer.error("consumer")
def consumer_raised(*, consumer: str, error: BaseException) -> str:
    """A consumer raised an exception for a sample, which it may have lost.

    Do: Report a bug with the traceback.
    """
    return f"{consumer} failed"


@observer.error("model")
def sample_damaged(*, model: str, reason: str) -> str:
    """The memory of a sample has no valid tensors.

    Do: Look for code in the model's worker that writes to its memory; else report a bug.
    """
    return f"a sample of {model} cannot be read: {reason}"


@observer.warning()
def samples_left(*, samples: int) -> str:
    """The gateway stopped while samples waited for slow consumers; they are lost.

    Do: Lower the shares of the models, or hash fewer columns.
    """
    return f"{samples} samples waited at the stop of the gateway and are lost"


@observer.error()
def observer_refused(*, reason: str) -> str:
    """The observer process cannot run with its settings.

    Do: Correct what the reason names; it is started again. A changed setting needs a restart of the
    gateway.
    """
    return f"the observer process cannot run: {reason}"


@drift.info("model")
def drift_reference_recorded(*, model: str, rows: int) -> str:
    """The reference of a model version was recorded from its requests; its drift is detected."""
    return f"{model}: drift reference of {rows} rows recorded"
