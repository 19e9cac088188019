"""Events of the gateway: start, readiness, reload, drain, and its processes."""

from __future__ import annotations

from iskander.foundation.logs.event import Source

gateway = Source("iskander.gateway")
server = Source("iskander.server", "gateway")
supervisor = Source("iskander.supervisor", "gateway")
processes = Source("iskander.processes", "gateway")
auxiliary = Source("iskander.auxiliary")
admin = Source("iskander.admin")
addresses = Source("iskander.addresses")


@gateway.warning("warning")
def setting_questionable(*, warning: str) -> str:
    """A setting has a deprecated name, and is read as the setting that replaced it.

    Do: Rename it in the file.
    """
    return warning


@gateway.warning("note")
def placement_restricted(*, note: str) -> str:
    """The cores or the memory of the machine do not permit what the settings ask for.

    Do: Compare with `iskander check FILE`; change `server.cores` or `workers.groups`.
    """
    return f"placement: {note}"


@gateway.info("total_bytes")
def memory_divided(*, total_bytes: int, shares: str, left_bytes: int) -> str:
    """The shares of `server.memory` at the start, and what is left for processes and models."""
    return f"memory {total_bytes >> 20} MiB: {shares}; {left_bytes >> 20} MiB left for models"


@gateway.warning("cpus")
def gateway_not_pinned(*, cpus: str, reason: str) -> str:
    """The gateway cannot be pinned to its cores; it runs on all.

    Do: Permit the cpus in the cgroup (`cpuset.cpus`) or change `server.cores`.
    """
    return f"placement: not pinned to the cpus {cpus}: {reason}"


@gateway.info("cpus")
def gateway_pinned(*, cpus: str) -> str:
    """The gateway is pinned to cores of its own."""
    return f"runs on the cpus {cpus}, the workers on others"


@addresses.warning()
def admin_port_missing(*, package: str, install: str) -> str:
    """A package of the extra `http` is missing, so the default admin port is not opened.

    Do: Install the extra, or set `admin.address` to an empty string.
    """
    return f"no admin port: {package} is not installed: {install}"


@addresses.warning("listener")
def listener_exposed(*, listener: str, setting: str) -> str:
    """An address is open to the network without tokens or TLS, as a setting permits.

    Do: Protect it, or listen on loopback.
    """
    return f"{listener} (permitted by `{setting}`)"


@admin.warning()
def page_missing(*, install: str) -> str:
    """The package of the page at `admin.address` is missing; metrics and health are served.

    Do: Install the extra, or set `admin.page` to false.
    """
    return f"no page at admin.address: jinja2 is not installed: {install}"


@server.info("arena")
def arena_allocated(*, arena: str, backing: str) -> str:
    """The input arena is allocated, with this kind of memory pages."""
    return f"{arena}: {backing}"


@server.warning("arena")
def arena_restricted(*, arena: str, notice: str) -> str:
    """The input arena has not the huge pages or the locked memory that `[arena]` asks for.

    Do: Reserve huge pages or raise RLIMIT_MEMLOCK; `iskander doctor` has the amounts.
    """
    return f"{arena}: {notice}"


@supervisor.info("arena")
def output_arena_allocated(*, arena: str, backing: str) -> str:
    """The output arena of a worker is allocated, with this kind of memory pages."""
    return f"{arena}: {backing}"


@supervisor.warning("arena")
def output_arena_restricted(*, arena: str, notice: str) -> str:
    """The output arena of a worker has not the pages or the lock that `[arena]` asks for.

    Do: Reserve huge pages or raise RLIMIT_MEMLOCK; `iskander doctor` has the amounts.
    """
    return f"{arena}: {notice}"


@server.info()
def ready(*, addresses: str, start_ms: int) -> str:
    """The start is complete, and requests are accepted.

    `/readyz` at `admin.address` has the reasons of models that are not ready yet.
    """
    return f"ready on {addresses} after {start_ms} ms"


@server.info("protocol")
def protocol_listening(*, protocol: str, address: str) -> str:
    """An optional protocol listens on an address."""
    return f"{protocol} on {address}"


@server.info()
def lame_duck_started(*, lame_duck_s: float) -> str:
    """The gateway stops: it reports not ready and still accepts requests."""
    return f"not ready; requests are accepted for another {lame_duck_s:g} s"


@server.info()
def drain_started(*, work: str) -> str:
    """The gateway rejects new requests and completes accepted ones."""
    return f"draining {work}"


@server.info()
def drain_progressed(*, work: str) -> str:
    """The gateway still has accepted work; logged each second."""
    return f"draining: {work}"


@server.warning()
def drain_timed_out(*, drain_s: float, work: str) -> str:
    """Accepted work was not complete in time and is aborted.

    Do: Raise `server.drain_s`, or look for clients that do not read their responses.
    """
    return f"not drained in {drain_s:g} s (`server.drain_s`): {work}"


@gateway.error()
def gateway_failed(*, reason: str) -> str:
    """The gateway ends: it cannot start, or its workers do not get ready.

    Do: Read the reason; the exit code has its kind (`iskander-gateway --help`).
    """
    return reason


@gateway.error()
def gateway_crashed(*, error: BaseException) -> str:
    """A gateway process ends with an exception.

    Do: Report a bug with the traceback.
    """
    return f"unexpected {type(error).__name__}"


@server.info()
def stopped() -> str:
    """The gateway has completed its drain, and its process ends."""
    return "stopped"


@gateway.warning("reason")
def reload_ignored(*, reason: str) -> str:
    """A reload was not started.

    Do: Repeat it when the gateway serves and the earlier reload has ended.
    """
    return f"reload ignored: {reason}"


@gateway.info()
def reloaded(*, note: str) -> str:
    """Changed settings are applied."""
    return f"reloaded: {note}"


@gateway.error("reason")
def reload_rejected(*, reason: str) -> str:
    """The configuration is invalid or needs a restart; nothing changed.

    Do: Correct the file, as `iskander check FILE` shows, or restart the gateway.
    """
    return f"reload rejected: {reason}"


@gateway.error()
def reload_failed(*, error: BaseException) -> str:
    """A reload raised an exception.

    Do: Report a bug with the traceback.
    """
    return "reload failed"


@processes.warning()
def replacement_ignored() -> str:
    """A reload of several processes was not started.

    Do: Repeat it when all processes are ready.
    """
    return "reload ignored: the processes are starting, stopping or being replaced"


@processes.error("reason")
def replacement_rejected(*, reason: str) -> str:
    """The configuration is invalid, needs a restart, or cannot be passed on; nothing changed.

    Do: Read the reason: correct the file, restart the gateway, or free space for
    `server.runtime_directory`.
    """
    return reason


@processes.info()
def replacement_started() -> str:
    """A reload replaces the processes one by one."""
    return "replacing the processes one by one"


@processes.info("child")
def process_replaced(*, child: int) -> str:
    """A process was replaced, and its successor is ready."""
    return f"process {child} is replaced"


@processes.error("child")
def replacement_undone(*, child: int, note: str) -> str:
    """A replaced process did not get ready; the previous settings are used again.

    Do: Read the log of that process; correct the settings.
    """
    return f"replacement undone: {note}"


@processes.error("child")
def replacement_incomplete(*, child: int, note: str) -> str:
    """A process does not get ready after a reload, nor with the previous settings.

    Do: Read the log of that process; the others keep serving.
    """
    return f"replacement incomplete: {note}"


@processes.error("child")
def process_start_failed(*, child: int, reason: str) -> str:
    """A gateway process cannot be started; the parent tries again.

    Do: Check the limits of processes and memory.
    """
    return f"process {child} cannot be started: {reason}"


@processes.error("child")
def process_ended(*, child: int, exit_code: int, delay_s: float) -> str:
    """A gateway process ended unexpectedly; the others keep serving.

    Do: Read the lines of that process; a negative code is a signal.
    """
    return f"process {child} ended with {exit_code}; restart in {delay_s:g} s"


@processes.info()
def processes_ready(*, count: int, addresses: str) -> str:
    """All gateway processes serve."""
    return f"{count} processes are ready on {addresses}"


@processes.error("child")
def process_silent(*, child: int, limit_s: float) -> str:
    """A gateway process sent no heartbeat and is killed.

    Do: Look for a stopped process or a machine without free CPU time or memory.
    """
    return f"process {child} sent no heartbeat for {limit_s:g} s: killed"


@processes.error("child")
def process_not_stopped(*, child: int, limit_s: float) -> str:
    """A gateway process did not stop in time and is killed.

    Do: Compare `server.drain_s` with the duration of the clients' streams.
    """
    return f"process {child} did not stop within {limit_s:g} s: killed"


@processes.error("child")
def runtime_directory_deleted(*, child: int) -> str:
    """Another program deleted the sockets of the running gateway.

    Do: Exclude `server.runtime_directory` from the cleaning of temporary files; reload.
    """
    return (
        f"the runtime directory was deleted: the notification socket of process {child} is created "
        "again; the process creates its own sockets when it is replaced"
    )


@processes.error()
def notification_socket_failed(*, reason: str) -> str:
    """The socket for the notifications of a process cannot be created again.

    Do: Create the runtime directory, or restart the gateway.
    """
    return f"the notification socket cannot be created: {reason}"


@auxiliary.error()
def auxiliary_process_crashed(*, error: BaseException) -> str:
    """An auxiliary process, such as that of traces, ends with an exception, and is started again.

    Do: Read the traceback. If it is of a setting or a variable of the environment, such as those of
    OpenTelemetry, correct it and restart the gateway. Otherwise report a bug.
    """
    return f"unexpected {type(error).__name__}"
