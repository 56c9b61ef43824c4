"""`pagoda generate`: offline generation, JSON lines in, JSON lines out, no server and no Ray."""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, TextIO

import click
from pydantic import Field, ValidationError, model_validator
from tqdm import tqdm

from pagoda.cluster.commands.options import engine_config, engine_options, share_cores
from pagoda.cluster.commands.progress import show_progress
from pagoda.cluster.ingress.answers import Choice
from pagoda.cluster.ingress.fields import CompletionTokensField
from pagoda.cluster.ingress.local import LocalWorkerClient
from pagoda.cluster.ingress.messages import ChatMessage
from pagoda.cluster.ingress.problems import first_problem
from pagoda.cluster.ingress.service import InferenceService
from pagoda.cluster.ingress.usage import usage
from pagoda.worker.async_engine import AsyncEngine
from pagoda.worker.engine_plan import plan_engine
from pagoda.worker.errors import InvalidRequestError, OverloadedError
from pagoda.worker.tokenizer import Tokenizer
from pagoda.worker.types import SamplingParams

_RETRY_S = 0.05


class Line(CompletionTokensField):
    """One line of input: a prompt (text or token ids) or messages, with sampling fields of its own."""

    id: str | int | None = None
    """Comes back with the result."""
    prompt: str | list[int] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _check_one_of(self) -> "Line":
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("prompt", "give either prompt or messages")
        return self


@dataclass(frozen=True, slots=True)
class Job:
    """A line that can be run."""

    id: str | int | None
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams


@click.command()
@engine_options
@click.option("--input", "source", type=click.File(encoding="utf-8"), default="-", help="JSON lines; - reads stdin.")
@click.option(
    "--output", "sink", type=click.File("w", encoding="utf-8", lazy=False), default="-", help="- writes to stdout."
)
@click.option("--max-tokens", type=int, help="For lines without max_tokens.  [default: up to the context length]")
@click.option("--temperature", type=float, help="For lines without temperature.  [default: 1.0]")
@click.option("--seed", type=int, help="For lines without seed.  [default: drawn]")
def generate(source: TextIO, sink: TextIO, **options: Any) -> None:
    """Generate for each line of INPUT, without a server.

    A line is an object with `prompt` (text or token ids) or `messages`, and optionally `id` and sampling fields such
    as `max_tokens`, `temperature`, `top_p`, `seed`, `n` and `stop`. Results come in the order of the lines. A bad line
    is named before anything is generated.
    """
    defaults = {name: options.pop(name) for name in ("max_tokens", "temperature", "seed")}
    lines = _parse(source, defaults)
    if options["tensor_parallel_size"] > 1:  # one rank alone leaves it to the engine, which knows what it may use
        share_cores(options)
    config = engine_config(options)
    plan_engine(config, num_ranks_here=config.tensor_parallel_size)
    tokenizer = Tokenizer(config.model_path)  # before the weights, which take longer
    with show_progress() as progress:
        engine = AsyncEngine(config, progress=progress)
    service = InferenceService(tokenizer, LocalWorkerClient(engine), engine.limits)
    try:
        asyncio.run(_run(service, lines, sink, num_at_once=4 * config.scheduler.max_num_seqs))
    finally:
        service.close()
        engine.shutdown()


def _parse(source: TextIO, defaults: dict[str, Any]) -> list[tuple[int, Line]]:
    """(line number, line) of every line that is not blank."""
    lines = []
    for number, text in enumerate(_texts(source), start=1):
        if not text.strip():
            continue
        try:
            line = Line.model_validate_json(text)
            line.settle_max_tokens()
            for name, value in defaults.items():
                if getattr(line, name) is None and value is not None:
                    setattr(line, name, value)
            line.sampling_params(default_max_tokens=None)
        except ValidationError as error:
            raise click.ClickException(f"line {number}: {first_problem(error.errors())[1]}") from error
        except InvalidRequestError as error:
            raise click.ClickException(f"line {number}: {error}") from error
        lines.append((number, line))
    return lines


def _texts(source: TextIO) -> Iterator[str]:
    try:
        yield from source
    except UnicodeDecodeError as error:
        raise click.ClickException(f"the input is not UTF-8: {error}") from error


async def _run(service: InferenceService, lines: list[tuple[int, Line]], sink: TextIO, *, num_at_once: int) -> None:
    jobs = [await _job(service, number, line) for number, line in lines]
    slots = asyncio.Semaphore(num_at_once)
    with tqdm(total=len(jobs), desc="generating", unit="line", file=sys.stderr) as bar:

        async def run(job: Job) -> dict[str, Any]:
            async with slots:
                result = await _generate_when_there_is_room(service, job)
            bar.update()
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(job)) for job in jobs]
                for index, task in enumerate(tasks):
                    sink.write(json.dumps({"index": index, **await task}, ensure_ascii=False) + "\n")
                    sink.flush()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures


async def _job(service: InferenceService, number: int, line: Line) -> Job:
    sampling = line.sampling_params(default_max_tokens=None)
    try:
        if line.messages is not None:
            prompt = await service.encode_chat([message.for_template() for message in line.messages])
        else:
            prompt = await service.encode(line.prompt) if isinstance(line.prompt, str) else line.prompt or []
        service.check(prompt, sampling)
    except InvalidRequestError as error:
        raise click.ClickException(f"line {number}: {error}") from error
    return Job(line.id, prompt, sampling)


async def _generate_when_there_is_room(service: InferenceService, job: Job) -> dict[str, Any]:
    while True:
        try:
            return await _generate(service, job)
        except OverloadedError:  # jobs are as many sequences as they have samples, and aborted ones take a step to go
            await asyncio.sleep(_RETRY_S)


async def _generate(service: InferenceService, job: Job) -> dict[str, Any]:
    choices = [Choice() for _ in range(job.sampling.n)]
    num_output_tokens = num_cached_tokens = 0
    async with aclosing(service.generate(job.prompt_token_ids, job.sampling).outputs) as outputs:
        async for batch in outputs:
            for output in batch:
                choices[output.index].text.append(output.text)
                choices[output.index].finish_reason = output.finish_reason
                num_output_tokens += output.num_new_tokens
                if output.index == 0:
                    num_cached_tokens = output.num_cached_tokens
    counts = usage(
        num_prompt_tokens=len(job.prompt_token_ids),
        num_output_tokens=num_output_tokens,
        num_cached_tokens=num_cached_tokens,
    )
    return {
        "id": job.id,
        "choices": [
            {"index": index, "text": "".join(choice.text), "finish_reason": choice.finish_reason}
            for index, choice in enumerate(choices)
        ],
        "usage": counts.model_dump(),
    }
