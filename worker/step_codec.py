"""Step plans as bytes, for ranks in other processes.

    first rank                                       another rank
    StepEncoder.encode(plan) --- plans, in order --> StepDecoder.decode(data), equal to the plan

A plan says what changed, and a steady decode step says almost nothing: who computes one more token as in the step
before is not told again, and a new block is four small numbers. No tensors, and no pickle: what comes from another
machine is data.
"""

from collections.abc import Iterable

from pagoda.proto import step_pb2
from pagoda.worker.types import NewSequence, SamplingParams, SchedulerOutput, SequenceId

_MOST = 2**63 - 1
"""A larger top-k keeps all tokens, as this one does."""


class StepEncoder:
    """The first rank's end. Every plan must go to every rank, from the first on."""

    def __init__(self) -> None:
        self._numbers: dict[SequenceId, int] = {}
        """Of the sequences that were not dropped."""
        self._free: list[int] = []
        """Numbers below the highest that nobody has."""
        self._last_scheduled: list[tuple[SequenceId, int]] = []

    def encode(self, plan: SchedulerOutput) -> bytes:
        message = step_pb2.StepPlan(step=plan.step)
        # What an earlier plan dropped has lost its number; what this one drops keeps it to the end of the plan.
        message.dropped.extend([self._number_of(sequence_id, message) for sequence_id in plan.dropped])
        for new in plan.new:
            number = self._number_of(new.sequence_id, message)
            message.started.append(_encode_started(new, number))
        if plan.block_updates:
            ids, groups, indexes, blocks = zip(*plan.block_updates, strict=True)
            message.updated.extend([self._number_of(sequence_id, message) for sequence_id in ids])
            if any(groups):
                message.updated_groups.extend(groups)
            message.updated_indexes.extend(indexes)
            message.updated_blocks.extend(blocks)
        if plan.block_copies:
            sources, destinations = zip(*plan.block_copies, strict=True)
            message.copied_from.extend(sources)
            message.copied_to.extend(destinations)
        self._encode_scheduled(plan, message)
        started = {new.sequence_id for new in plan.new}
        for sequence_id in plan.dropped:
            if sequence_id not in started and (freed := self._numbers.pop(sequence_id, None)) is not None:
                self._free.append(freed)
        data: bytes = message.SerializeToString()
        return data

    def _encode_scheduled(self, plan: SchedulerOutput, message: step_pb2.StepPlan) -> None:
        scheduled = list(plan.num_scheduled_tokens.items())
        if scheduled == self._last_scheduled:
            message.computes_the_same = True
            return
        self._last_scheduled = scheduled
        message.scheduled.extend([self._number_of(sequence_id, message) for sequence_id, _ in scheduled])
        if any(count != 1 for _, count in scheduled):
            message.scheduled_tokens.extend([count for _, count in scheduled])

    def _number_of(self, sequence_id: SequenceId, message: step_pb2.StepPlan) -> int:
        """The sequence's number; if it has none, it gets one, and `message` says so."""
        number = self._numbers.get(sequence_id)
        if number is None:
            number = self._free.pop() if self._free else len(self._numbers)
            self._numbers[sequence_id] = number
            message.named.append(_encode_text(sequence_id))
            message.numbers.append(number)
        return number


class StepDecoder:
    """Another rank's end."""

    def __init__(self) -> None:
        self._ids: dict[int, SequenceId] = {}
        """By number. A number that was given back keeps its last sequence until it is given out again."""
        self._last_scheduled: dict[SequenceId, int] = {}

    def decode(self, data: bytes) -> SchedulerOutput:
        """Raises `ValueError`, `KeyError` or protobuf's `DecodeError` for what is no plan, or not the next one."""
        message = step_pb2.StepPlan.FromString(data)
        ids = self._ids
        for name, number in zip(message.named, message.numbers, strict=True):
            ids[number] = SequenceId(_decode_text(name))
        if not message.computes_the_same:
            counts: Iterable[int] = message.scheduled_tokens or [1] * len(message.scheduled)
            self._last_scheduled = {ids[number]: count for number, count in zip(message.scheduled, counts, strict=True)}
        groups: Iterable[int] = message.updated_groups or [0] * len(message.updated)
        updates = zip(message.updated, groups, message.updated_indexes, message.updated_blocks, strict=True)
        return SchedulerOutput(
            step=message.step,
            dropped=[ids[number] for number in message.dropped],
            new=[_decode_started(started, ids[started.number]) for started in message.started],
            block_updates=[(ids[number], group, index, block) for number, group, index, block in updates],
            block_copies=list(zip(message.copied_from, message.copied_to, strict=True)),
            num_scheduled_tokens=dict(self._last_scheduled),
        )


def _encode_started(new: NewSequence, number: int) -> step_pb2.StartedSequence:
    return step_pb2.StartedSequence(
        number=number,
        token_ids=new.token_ids,
        num_output_tokens=new.num_output_tokens,
        num_computed_tokens=new.num_computed_tokens,
        num_shared_tokens=new.num_shared_tokens,
        block_tables=[step_pb2.BlockTable(block_ids=table) for table in new.block_tables],
        sampling=_encode_sampling(new.sampling),
        seed=new.seed,
        eos_token_ids=new.eos_token_ids,
        next_prompt_logprob=new.next_prompt_logprob,
    )


def _decode_started(started: step_pb2.StartedSequence, sequence_id: SequenceId) -> NewSequence:
    return NewSequence(
        sequence_id=sequence_id,
        token_ids=tuple(started.token_ids),
        num_output_tokens=started.num_output_tokens,
        num_computed_tokens=started.num_computed_tokens,
        num_shared_tokens=started.num_shared_tokens,
        block_tables=tuple(tuple(table.block_ids) for table in started.block_tables),
        sampling=_decode_sampling(started.sampling),
        seed=started.seed,
        eos_token_ids=frozenset(started.eos_token_ids),
        next_prompt_logprob=started.next_prompt_logprob,
    )


def _encode_sampling(sampling: SamplingParams) -> step_pb2.StepSampling:
    return step_pb2.StepSampling(
        temperature=sampling.temperature,
        top_k=min(sampling.top_k, _MOST),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        biased_token_ids=sampling.logit_bias.keys(),
        biases=sampling.logit_bias.values(),
        seed=sampling.seed,
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop=map(_encode_text, sampling.stop),
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def _decode_sampling(sampling: step_pb2.StepSampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(zip(sampling.biased_token_ids, sampling.biases, strict=True)),
        seed=sampling.seed if sampling.HasField("seed") else None,
        n=sampling.n,
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        min_tokens=sampling.min_tokens,
        stop=tuple(map(_decode_text, sampling.stop)),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
    )


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
