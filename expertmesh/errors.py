"""The exceptions that ExpertMesh raises on purpose.

ExpertMeshError
├── StartupError            what a user can fix before a process is up: exit code and one line
│   ├── SettingsError       a flag, an environment variable or a key of the configuration file
│   ├── CheckpointError     a model folder: missing, truncated, extra or misshapen content
│   └── PortError           an address that cannot be bound
├── RequestError            what a client can fix: carries the parameter and a code
│   ├── ModelNotFoundError  the model named is not the one served
│   ├── ContextLengthError  prompt, or prompt and output, longer than the context
│   └── UnsupportedError    a parameter or endpoint that this server does not have
├── AuthenticationError     a caller shows no API key, or one that is not accepted
├── OverloadedError         queues are full; try again later
│   └── StoppingError       the gateway is stopping; try again with another, or once it is back
├── ExpertUnavailableError  an expert has no usable copy
├── DeadlineError           a request was not done by its deadline
├── EngineError             the engine failed while it worked on a request
│   └── QuarantineError     expert workers are lost when they compute the request
├── WireError               a message that does not follow the protocol: carries a code
└── PeerError               another process is unreachable, incompatible or hung
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import, and the command line wants only the exceptions
    from expertmesh.v1 import expert_service_pb2 as pb


class ExpertMeshError(Exception):
    """Root of all exceptions raised on purpose."""


class StartupError(ExpertMeshError):
    """A process cannot start. Shown as `error: WHAT. WHY. FIX` without a traceback.

    Args:
        message: What is wrong and why, naming the culprit.
        fix: What the user can do about it; may be empty.
    """

    exit_code = 1

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} ({self.fix})" if self.fix else self.message


class SettingsError(StartupError):
    """A setting has a value that cannot work."""

    exit_code = 2


class CheckpointError(StartupError):
    """A model folder cannot be served."""

    exit_code = 3


class PortError(StartupError):
    """An address cannot be bound."""

    exit_code = 4


class RequestError(ExpertMeshError):
    """A request that a client has to change before it can be served.

    Args:
        message: What is wrong, with the value and what was expected.
        param: Dotted path of the parameter, e.g. `messages.0.content`.
        code: Machine-readable code of the error envelope.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ModelNotFoundError(RequestError):
    """The model named is not the one served."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="model_not_found")


class ContextLengthError(RequestError):
    """Prompt, or prompt and output, longer than the context."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class UnsupportedError(RequestError):
    """A parameter that this server does not have."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="unsupported_parameter")


class AuthenticationError(ExpertMeshError):
    """A caller shows no API key, or one that is not accepted."""


class OverloadedError(ExpertMeshError):
    """Queues are full.

    Args:
        message: Which limit was reached.
        retry_after_s: After how many seconds a new try makes sense.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoppingError(OverloadedError):
    """The gateway is stopping, so it takes no request and ends those that it has."""

    def __init__(self) -> None:
        super().__init__("the gateway is stopping", retry_after_s=5.0)


class ExpertUnavailableError(ExpertMeshError):
    """An expert has no usable copy.

    Args:
        missing: (layer, expert) pairs without a usable copy.
        detail: Which expert worker failed and how, for the log; may be empty.

    Attributes:
        public: What a client may know: no address, and no text of another process.
    """

    def __init__(self, missing: Sequence[tuple[int, int]], *, detail: str = "") -> None:
        self.missing = tuple(missing)
        shown = ", ".join(f"layer {layer} expert {expert}" for layer, expert in self.missing[:8])
        more = f" and {len(self.missing) - 8} more" if len(self.missing) > 8 else ""
        self.public = f"no usable copy of {shown}{more}"
        super().__init__(f"{self.public}: {detail}" if detail else self.public)


class DeadlineError(ExpertMeshError):
    """A request was not done by its deadline."""


class EngineError(ExpertMeshError):
    """The engine failed while it worked on a request."""


class QuarantineError(EngineError):
    """Expert workers are lost when they compute the request.

    Args:
        layer: In which it happens.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        super().__init__(
            f"the request was ended since expert workers fail when they compute it (layer {layer})"
        )


class WireError(ExpertMeshError):
    """A message that does not follow the protocol.

    Args:
        code: Code to answer with.
        message: Names the field, the value and what was expected.
        expert_ids: Experts concerned.
    """

    def __init__(
        self,
        code: pb.ForwardError.Code,
        message: str,
        *,
        expert_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.expert_ids = tuple(expert_ids)


class PeerError(ExpertMeshError):
    """Another process is unreachable, incompatible or hung."""
