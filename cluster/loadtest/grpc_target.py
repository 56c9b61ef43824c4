"""A Pagoda server over gRPC."""

import time
from collections.abc import Callable

import grpc

from pagoda.cluster.chat_client import authorization
from pagoda.cluster.loadtest.target import TOKENIZE_TIMEOUT_S, Answer, LoadRequest, SendError, TargetError, check_counts
from pagoda.proto import inference_pb2 as pb
from pagoda.proto.inference_pb2_grpc import InferenceStub

_SHORT_TIMEOUT_S = 10.0
_SIGNS_OF_RESET = ("recvmsg", "Stream removed", "Socket closed", "Broken pipe")
_MOST_MESSAGES = 10_000
_MAX_MESSAGE_BYTES = 64 * 2**20


class GrpcTarget:
    """Streams `Chat` and `Generate`. `address` is host:port; TLS if there is the PEM of an `authority`."""

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        api_key: str | None = None,
        authority: bytes | None = None,
        timeout_s: float = 600.0,
        sampling: pb.Sampling | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.model = model
        self._timeout_s = timeout_s
        self._sampling = sampling or pb.Sampling()
        self._clock = clock
        self._metadata = tuple((name.lower(), value) for name, value in (authorization(api_key) or {}).items())
        options = [("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)]
        self._channel = (
            grpc.aio.insecure_channel(address, options=options)
            if authority is None
            else grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority), options=options)
        )
        self._stub = InferenceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def models(self) -> list[str]:
        """Names of what is served. Raises `TargetError`."""
        try:
            answer = await self._stub.ListModels(
                pb.ListModelsRequest(), timeout=_SHORT_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise TargetError(f"no server at {self.address}: {error.details()}") from error
        return [model.id for model in answer.models]

    async def send(self, request: LoadRequest, answer: Answer) -> None:
        sampling = pb.Sampling(max_tokens=request.max_tokens, seed=request.seed)
        sampling.MergeFrom(self._sampling)
        call = (
            self._stub.Chat(
                pb.ChatRequest(model=self.model, messages=_messages(request), sampling=sampling),
                timeout=self._timeout_s,
                metadata=self._metadata,
            )
            if request.messages
            else self._stub.Generate(
                self._generate(request, sampling), timeout=self._timeout_s, metadata=self._metadata
            )
        )
        num_messages = 0
        try:
            async for piece in call:
                if piece.text or (piece.finish_reason and not answer.piece_s):
                    answer.piece_s.append(self._clock())
                    answer.text.append(piece.text)
                if (num_messages := num_messages + 1) > _MOST_MESSAGES + 8 * request.max_tokens:
                    call.cancel()
                    raise SendError("garbage", "goes on and on beyond max_tokens")
                if piece.finish_reason:
                    answer.finish_reason = piece.finish_reason
                    answer.num_prompt_tokens = piece.usage.prompt_tokens
                    answer.num_cached_tokens = piece.usage.cached_tokens
                    answer.num_output_tokens = piece.usage.completion_tokens
        except grpc.aio.AioRpcError as error:
            raise SendError(_kind(error), error.details() or "") from error
        if answer.finish_reason is None:
            raise SendError("cut", "ended without a finish reason")
        check_counts(answer, request.max_tokens)

    def _generate(self, request: LoadRequest, sampling: pb.Sampling) -> pb.GenerateRequest:
        if isinstance(request.prompt, str):
            return pb.GenerateRequest(model=self.model, text=request.prompt, sampling=sampling)
        return pb.GenerateRequest(model=self.model, token_ids=pb.TokenIds(ids=request.prompt), sampling=sampling)

    async def tokenize(self, request: LoadRequest) -> list[int] | None:
        if not request.messages and not isinstance(request.prompt, str):
            return list(request.prompt)
        what = pb.TokenizeRequest(model=self.model)
        if request.messages:
            what.conversation.CopyFrom(pb.Conversation(messages=_messages(request)))
        else:
            assert isinstance(request.prompt, str)
            what.text = request.prompt
        try:
            answer = await self._stub.Tokenize(
                what, timeout=min(self._timeout_s, TOKENIZE_TIMEOUT_S), metadata=self._metadata
            )
        except grpc.aio.AioRpcError:
            return None
        return list(answer.token_ids)


def _messages(request: LoadRequest) -> list[pb.Message]:
    return [pb.Message(role=message["role"], content=message["content"]) for message in request.messages]


def _kind(error: grpc.aio.AioRpcError) -> str:
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return "timeout"
        case grpc.StatusCode.UNAVAILABLE if (error.details() or "").startswith("failed to connect"):
            return "refused"
        case grpc.StatusCode.UNAVAILABLE if any(sign in (error.details() or "") for sign in _SIGNS_OF_RESET):
            return "reset"
        case code:
            return f"grpc_{code.name.lower()}"
