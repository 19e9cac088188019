"""One message of a batch stream: where its parts are, and what its header says.

Runs on: gateway loop; on a thread for long messages.
"""

from __future__ import annotations

from builtins import memoryview  # Where mypyc looks for the types of fields.

from iskander.arrow import ipc
from iskander.errors import IskanderError
from iskander.gateway.protocols.flight.plan import require_header
from iskander.interprocess.memory.client_segment import SegmentRange


class BatchMessage:
    """A record batch or a dictionary, whose header is parsed once, when it is first needed.

    Most record batches are never parsed: the plan knows their header.

    Attributes:
        raw: The FlightData message.
        header: Arrow IPC header; empty if the message has none.
        body: Buffers of the batch, in `raw` or in the client's region.
        app_metadata: Bytes that the client attached.
        head_bytes: Bytes of `raw` before the body; 0 if the body is not at its end.
        error: Why the client's region does not have the body, which is empty then; or None.
    """

    __slots__ = (
        "_batch",
        "_dictionary",
        "_head",
        "app_metadata",
        "body",
        "error",
        "head_bytes",
        "header",
        "raw",
    )

    def __init__(
        self,
        raw: bytes | memoryview,
        header: bytes | memoryview,
        body: memoryview | SegmentRange,
        app_metadata: bytes | memoryview = b"",
        head_bytes: int = 0,
    ) -> None:
        self.raw = raw
        self.header = header
        self.body = body
        self.app_metadata = app_metadata
        self.head_bytes = head_bytes
        self.error: IskanderError | None = None
        self._head: ipc.Message | None = None
        self._batch: ipc.Batch | None = None
        self._dictionary: tuple[int, bool, ipc.Batch] | None = None

    @property
    def size(self) -> int:
        """Bytes of header and body."""
        return len(self.header) + len(self.body)

    @property
    def head(self) -> ipc.Message:
        """Fields common to all headers; raises `LimitExceeded` or `MalformedInput`."""
        if self._head is None:
            require_header(self.header)
            self.header = bytes(self.header)
            self._head = ipc.read_message(self.header)
        return self._head

    @property
    def batch(self) -> ipc.Batch:
        """The header of a record batch; raises `MalformedInput`."""
        if self._batch is None:
            head = self.head
            self._batch = ipc.read_batch(self.header, head)
        return self._batch

    @property
    def dictionary(self) -> tuple[int, bool, ipc.Batch]:
        """Id of a dictionary, whether it is a delta, and its batch; raises `MalformedInput`."""
        if self._dictionary is None:
            head = self.head
            self._dictionary = ipc.read_dictionary(self.header, head)
        return self._dictionary

    @property
    def is_dictionary(self) -> bool:
        """Whether the message, which may be invalid, is a dictionary."""
        try:
            return self.head.kind == ipc.DICTIONARY_BATCH
        except IskanderError:
            return False
