"""The public gRPC API through Ray Serve: what a client with nothing but the proto sees."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from local_server import DEADLINE_S, wait_until
from test_serve_ray import Service, pagoda_serve
from tiny_model import write_tiny_model

from pagoda.proto import inference_pb2 as pb
from pagoda.proto import inference_pb2_grpc

MODEL = "small"
MESSAGES = [pb.Message(role="user", content="Hello")]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("models")
    model = write_tiny_model(folder / MODEL, tokenizer_from=tiny, max_position=100_000)
    with pagoda_serve(model, folder, "--log-level", "info") as service:  # Ray shows the ingress's log lines
        service.wait_until_it_says(f"{MODEL} is served at")
        yield service


@pytest.fixture
def channel(service: Service) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel:
        yield channel


@pytest.fixture
def inference(channel: grpc.Channel) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(channel)


def generate(inference: Any, **fields: Any) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(**{"model": MODEL, "text": "Once", **fields})
    return list(inference.Generate(request, timeout=DEADLINE_S))


def status_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value.code(), error.value.details()


def test_generate_is_what_http_says(service: Service, inference: Any) -> None:
    """Text, tokens, log probabilities and usage agree with the completions endpoint's."""
    sampling = pb.Sampling(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    responses = generate(inference, sampling=sampling)
    body = {"model": MODEL, "prompt": "Once", "temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}
    url = f"http://127.0.0.1:{service.port}/v1/completions"
    http = httpx.post(url, json=body, timeout=DEADLINE_S).json()
    (choice,) = http["choices"]
    assert "".join(response.text for response in responses) == choice["text"]
    logprobs = [entry for response in responses for entry in response.logprobs]
    assert [entry.sampled.logprob for entry in logprobs] == pytest.approx(choice["logprobs"]["token_logprobs"])
    assert sum(len(response.token_ids) for response in responses) == 12
    last = responses[-1]
    assert (last.finish_reason, last.usage.completion_tokens) == ("length", 12)
    assert last.usage.prompt_tokens == http["usage"]["prompt_tokens"]
    assert len({response.request_id for response in responses}) == 1


def test_time_that_is_over_is_a_status(inference: Any) -> None:
    """For both methods, in the middle of an answer; and a timeout that is none is refused by its name."""
    sampling = pb.Sampling(max_tokens=90_000, ignore_eos=True)
    limited = {"model": MODEL, "sampling": sampling, "timeout_s": 0.5}
    for call in (
        lambda: list(inference.Generate(pb.GenerateRequest(text="Once", **limited), timeout=DEADLINE_S)),
        lambda: list(inference.Chat(pb.ChatRequest(messages=MESSAGES, **limited), timeout=DEADLINE_S)),
    ):
        assert status_of(call)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    code, details = status_of(lambda: generate(inference, timeout_s=-1.0))
    assert (code, details.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "timeout_s")
    assert generate(inference, sampling=pb.Sampling(max_tokens=1), timeout_s=60.0)


def test_chat_streams_every_sample(inference: Any) -> None:
    sampling = pb.Sampling(n=3, max_tokens=4, ignore_eos=True, seed=5)
    responses = list(
        inference.Chat(pb.ChatRequest(model=MODEL, messages=MESSAGES, sampling=sampling), timeout=DEADLINE_S)
    )
    ended = [response.index for response in responses if response.finish_reason]
    assert sorted(ended) == [0, 1, 2]
    assert len(responses) > 3


def test_token_ids_are_a_prompt_too(inference: Any) -> None:
    token_ids = inference.Tokenize(pb.TokenizeRequest(model=MODEL, text="Once"), timeout=DEADLINE_S).token_ids
    sampling = pb.Sampling(temperature=0, max_tokens=5, ignore_eos=True)
    by_ids = generate(inference, token_ids=pb.TokenIds(ids=token_ids), sampling=sampling)
    by_text = generate(inference, sampling=sampling)  # a message holds what came since the last one
    assert [token for r in by_ids for token in r.token_ids] == [token for r in by_text for token in r.token_ids]


def test_tokenize_renders_conversations(inference: Any) -> None:
    request = pb.TokenizeRequest(model=MODEL, conversation=pb.Conversation(messages=MESSAGES))
    answer = inference.Tokenize(request, timeout=DEADLINE_S)
    assert len(answer.token_ids) > 5
    assert answer.max_model_len > 0


def test_models_are_listed(inference: Any) -> None:
    (model,) = inference.ListModels(pb.ListModelsRequest(), timeout=DEADLINE_S).models
    assert model.id == MODEL


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "model:"),
        ({"model": "\U0001f642" * 100_000}, grpc.StatusCode.NOT_FOUND, "model:"),
        ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "prompt:"),
        ({"token_ids": pb.TokenIds(ids=[10**8])}, grpc.StatusCode.INVALID_ARGUMENT, "prompt:"),
        ({"sampling": pb.Sampling(temperature=-1)}, grpc.StatusCode.INVALID_ARGUMENT, "temperature:"),
        ({"sampling": pb.Sampling(temperature=float("nan"))}, grpc.StatusCode.INVALID_ARGUMENT, "temperature:"),
        ({"sampling": pb.Sampling(n=0)}, grpc.StatusCode.INVALID_ARGUMENT, "n:"),
        ({"sampling": pb.Sampling(logprobs=21)}, grpc.StatusCode.INVALID_ARGUMENT, "logprobs:"),
        ({"sampling": pb.Sampling(logit_bias={10**8: 1.0})}, grpc.StatusCode.INVALID_ARGUMENT, "logit_bias:"),
        ({"sampling": pb.Sampling(max_tokens=10**7)}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens:"),
        ({"request_id": "x" * 200}, grpc.StatusCode.INVALID_ARGUMENT, "request_id:"),
    ],
)
def test_bad_requests_name_the_field(inference: Any, fields: dict[str, Any], code: grpc.StatusCode, says: str) -> None:
    """And the service goes on."""
    found, details = status_of(lambda: generate(inference, **fields))
    assert (found, details[: len(says)]) == (code, says)
    assert generate(inference, sampling=pb.Sampling(max_tokens=1))


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe"])
@pytest.mark.parametrize(("method", "kind"), [("Generate", "GenerateRequest"), ("Tokenize", "TokenizeRequest")])
def test_bytes_that_are_no_request(
    service: Service, channel: grpc.Channel, method: str, kind: str, data: bytes
) -> None:
    """Rubbish, and text that is not UTF-8: the client's mistake like any other, and counted as one."""
    labels = (f'method="{method}"', 'code="INVALID_ARGUMENT"')
    before = value(service, "grpc_requests_total", *labels)
    call = (channel.unary_stream if method == "Generate" else channel.unary_unary)(f"/pagoda.v1.Inference/{method}")
    code, details = status_of(lambda: list(call(data, timeout=DEADLINE_S)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("request: ")
    assert f"pagoda.v1.{kind}" in details
    assert value(service, "grpc_requests_total", *labels) == before + 1


def test_too_long_conversations_are_only_tokenised(inference: Any) -> None:
    """And named as the client wrote them."""
    messages = [pb.Message(role="user", content="a b " * 50_100)]
    conversation = pb.Conversation(messages=messages)
    answer = inference.Tokenize(pb.TokenizeRequest(model=MODEL, conversation=conversation), timeout=DEADLINE_S)
    assert len(answer.token_ids) > answer.max_model_len
    request = pb.ChatRequest(model=MODEL, messages=messages)
    code, details = status_of(lambda: list(inference.Chat(request, timeout=DEADLINE_S)))
    assert (code, details[:9]) == (grpc.StatusCode.INVALID_ARGUMENT, "messages:")


def test_samples_share_what_was_cached(inference: Any) -> None:
    """Sample 1 finds what sample 0 has just computed, which is no hit."""
    request = pb.ChatRequest(
        model=MODEL,
        messages=[pb.Message(role="user", content="never said before " * 40)],
        sampling=pb.Sampling(n=2, max_tokens=2, ignore_eos=True),
    )
    ends = [answer for answer in inference.Chat(request, timeout=DEADLINE_S) if answer.finish_reason]
    one, other = [answer.usage for answer in ends]
    assert one.cached_tokens == other.cached_tokens <= 32 < one.prompt_tokens, "no more than the system prompt"


def test_clients_mistake_leaves_no_stack_trace(service: Service, inference: Any) -> None:
    """Serve writes two for whatever a method raises, unless it is kept from that.

    Lines take a while to arrive, but in order: once that of the last request is here, those before it are.
    """
    for fields in ({"model": "other"}, {"sampling": pb.Sampling(n=0)}):
        status_of(lambda fields=fields: generate(inference, **fields))  # type: ignore[misc]
    status_of(lambda: inference.Tokenize(pb.TokenizeRequest(model="other"), timeout=DEADLINE_S))
    httpx.post(f"http://127.0.0.1:{service.port}/v1/none-such", timeout=DEADLINE_S)
    service.wait_until_it_says("/v1/none-such' 404")
    assert "Traceback" not in service.log.read_text()


def test_chat_without_messages_or_with_an_unknown_role(inference: Any) -> None:
    for messages, says in (([], "messages:"), ([pb.Message(role="x", content="y")], "messages.0.role:")):
        request = pb.ChatRequest(model=MODEL, messages=messages)
        code, details = status_of(lambda request=request: list(inference.Chat(request, timeout=DEADLINE_S)))  # type: ignore[misc]
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith(says)


def value(service: Service, series: str, *labels: str) -> float:
    """Of the only series of that name with these labels; 0 if there is none."""
    text = httpx.get(f"http://127.0.0.1:{service.port}/metrics", timeout=DEADLINE_S).text
    lines = [line for line in text.splitlines() if line.startswith(f"pagoda_{series}{{")]
    found = [float(line.split()[-1]) for line in lines if all(label in line for label in labels)]
    assert len(found) <= 1
    return sum(found)


def num_running(service: Service) -> float:
    return value(service, "num_requests_running")


def endless(inference: Any) -> Any:
    sampling = pb.Sampling(max_tokens=90_000, ignore_eos=True)
    return inference.Generate(pb.GenerateRequest(model=MODEL, text="Once", sampling=sampling, request_id="mine"))


def test_abort_ends_a_running_request(service: Service, inference: Any) -> None:
    stream = endless(inference)
    first = next(stream)
    assert first.request_id.startswith("mine")
    inference.Abort(pb.AbortRequest(request_id="unknown"), timeout=DEADLINE_S)
    inference.Abort(pb.AbortRequest(request_id=first.request_id), timeout=DEADLINE_S)
    code, _ = status_of(lambda: list(stream))
    assert code is grpc.StatusCode.ABORTED
    wait_until(lambda: num_running(service) == 0, "no sequence runs")


def test_client_that_cancels_is_noticed(service: Service, inference: Any) -> None:
    stream = endless(inference)
    next(stream)
    stream.cancel()
    wait_until(lambda: num_running(service) == 0, "no sequence runs")


def test_calls_are_counted_and_logged(service: Service, inference: Any) -> None:
    """A good call, a client's mistake and a client that goes: a line and a count each, and no stack trace."""
    codes = ("OK", "INVALID_ARGUMENT", "CANCELLED")
    before = [value(service, "grpc_requests_total", 'method="Generate"', f'code="{code}"') for code in codes]
    generate(inference, sampling=pb.Sampling(max_tokens=3, ignore_eos=True), request_id="counted")
    status_of(lambda: generate(inference, sampling=pb.Sampling(n=0)))
    stream = endless(inference)
    next(stream)
    stream.cancel()
    wait_until(lambda: num_running(service) == 0, "no sequence runs")
    after = [value(service, "grpc_requests_total", 'method="Generate"', f'code="{code}"') for code in codes]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 1]
    for says in ("Generate OK id=counted-", "Generate INVALID_ARGUMENT duration_ms=", "Generate CANCELLED id=mine-"):
        wait_until(lambda says=says: says in service.log.read_text(), f"the log says {says!r}")  # type: ignore[misc]
    (line,) = [line for line in service.log.read_text().splitlines() if "id=counted-" in line]
    assert "output=3" in line
    assert "finish=length" in line


def test_stop_string_counts_as_stopped(service: Service, inference: Any) -> None:
    """By both APIs; the call through Ray Serve is left to return by itself."""
    sampling = pb.Sampling(temperature=0, max_tokens=30, ignore_eos=True)
    text = "".join(response.text for response in generate(inference, sampling=sampling))
    series = "request_success_total"
    before = [value(service, series, f'finished_reason="{reason}"') for reason in ("stop", "abort")]
    sampling.MergeFrom(pb.Sampling(stop=[text[5:10]], max_tokens=90_000))
    assert generate(inference, sampling=sampling)[-1].finish_reason == "stop"
    body = {"model": MODEL, "prompt": "Once", "temperature": 0, "max_tokens": 90_000, "stop": text[5:10]}
    url = f"http://127.0.0.1:{service.port}/v1/completions"
    answer = httpx.post(url, json=body | {"ignore_eos": True}, timeout=DEADLINE_S).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    wait_until(lambda: num_running(service) == 0, "no sequence runs")
    after = [value(service, series, f'finished_reason="{reason}"') for reason in ("stop", "abort")]
    assert after == [before[0] + 2, before[1]]


def test_health_and_reflection(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "pagoda.v1.Inference"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
    watched.cancel()
    code, _ = status_of(lambda: health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=DEADLINE_S))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "pagoda.v1.Inference" in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_no_stack_trace_in_any_log(service: Service) -> None:
    """The last test: of all the mistakes that clients made before."""
    assert "Generate NOT_FOUND" in service.log.read_text()
    assert "Traceback" not in service.log.read_text()
    assert "Request failed" not in service.log.read_text()
