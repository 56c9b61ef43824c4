"""Groups of layers that see a window: what they hold, what they give up, and what is found again."""

import random

import pytest
from fakes import Replica, hash_root

from pagoda.worker.block_hash import hash_blocks
from pagoda.worker.block_pool import BlockKey
from pagoda.worker.kv_spec import blocks_in_window
from pagoda.worker.prefix_lookup import MissReason

P = 4
STEP = 16
WINDOW = 10
VOCAB_SIZE = 1000


def make_replica(
    windows: tuple[int, ...] = (0, WINDOW), *, num_blocks: int = 400, step: int = STEP, **changes: int
) -> Replica:
    return Replica(
        num_blocks=num_blocks,
        block_size=P,
        windows=windows,
        max_num_batched_tokens=step,
        vocab_size=VOCAB_SIZE,
        **changes,
    )


def text(length: int, *, seed: int = 0) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(VOCAB_SIZE) for _ in range(length)]


def num_held(replica: Replica) -> int:
    return replica.pool.num_blocks - replica.pool.num_free


def run(replica: Replica, name: str, prompt: list[int], *, max_tokens: int = 8) -> int:
    """Run one request to its end. Returns how many of its prompt tokens were found in the cache."""
    replica.add(name, prompt, max_tokens=max_tokens)
    replica.run()
    return replica.end(name).num_cached_tokens


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // P * P


@pytest.mark.parametrize("prompt_len", [1, 10 * WINDOW], ids=["generated", "prompt in chunks"])
@pytest.mark.parametrize("windows", [(WINDOW,), (WINDOW, 2 * WINDOW), (0, WINDOW)], ids=str)
def test_what_a_window_holds_is_bounded(windows: tuple[int, ...], prompt_len: int) -> None:
    """Over ten windows and more, in every step; what sees everything holds everything."""
    replica = make_replica(windows)
    replica.add("a", text(prompt_len), max_tokens=12 * WINDOW, ignore_eos=True)
    most = 0
    while replica.scheduler.has_work():
        replica.step()
        for sequence in replica.scheduler._running:
            table = replica.manager.table(sequence)
            for window, group in zip(windows, table.groups, strict=True):
                held = sum(block is not None for block in group)
                assert held <= blocks_in_window(window, P, STEP) if window else held == len(group)
            most = max(most, num_held(replica))
    bound = sum(blocks_in_window(window, P, STEP) for window in windows if window)
    num_columns = -(-(prompt_len + 12 * WINDOW) // P)
    assert most <= bound + (num_columns if 0 in windows else 0)
    replica.check_outputs()


def test_a_window_only_model_runs_contexts_that_the_pool_could_never_hold() -> None:
    """Two at once, each five times as long as all blocks together."""
    num_blocks = 2 * blocks_in_window(WINDOW, P, STEP)
    replica = make_replica((WINDOW,), num_blocks=num_blocks, max_model_len=6 * num_blocks * P)
    for name in "ab":
        replica.add(name, text(5 * num_blocks * P, seed=ord(name)), max_tokens=30, ignore_eos=True)
    replica.run()
    assert replica.stats.num_preemptions == 0
    replica.check_outputs()


def test_a_prompt_is_found_though_the_head_of_its_windows_is_gone() -> None:
    """The groups with full attention have all of it, those with a window only what lies before its end."""
    replica = make_replica()
    prompt = text(80)
    run(replica, "first", prompt)
    hashes = hash_blocks(hash_root(b""), prompt, P)
    for block_hash in hashes[: len(hashes) - -(-WINDOW // P)]:
        if (block := replica.pool.lookup(BlockKey(block_hash, 1))) is not None:
            replica.pool.withdraw(block)
    assert run(replica, "again", prompt) == len(prompt) - 1
    replica.check_outputs()


@pytest.mark.parametrize("windows", [(WINDOW,), (0, WINDOW), (0, 3, 25)], ids=str)
def test_the_next_turn_finds_all_of_the_last_one(windows: tuple[int, ...]) -> None:
    """A conversation: each prompt is all that was said before and a little more."""
    replica = make_replica(windows)
    history = text(30)
    run(replica, "0", history)
    history += replica.output("0")
    for turn in range(1, 8):
        prompt = history + text(7, seed=turn)
        # The last token of an answer is never put through the model, so its block is not full yet.
        assert run(replica, str(turn), prompt, max_tokens=20) >= whole_blocks(len(history) - 1)
        history = prompt + replica.output(str(turn))
    replica.check_outputs()


def test_a_prompt_that_parts_in_the_last_block_finds_what_lies_before_that() -> None:
    """Scenario: a template spells the end of an answer otherwise once it is history."""
    replica = make_replica(num_blocks=60)
    prompt = text(40)
    run(replica, "first", prompt, max_tokens=27)
    said = prompt + replica.output("first")
    run_others(replica)
    known = whole_blocks(len(said) - 1)
    for cut in (1, P):
        assert run(replica, f"cut {cut}", said[: known - cut] + text(5, seed=cut), max_tokens=1) == known - P


def run_others(replica: Replica, *, seed: int = 0) -> None:
    """Others take the blocks that are reused first."""
    for number in range(3):
        run(replica, f"other {seed}.{number}", text(20, seed=900 + 10 * seed + number), max_tokens=2)


NUM_TURNS, QUESTION_LEN, ANSWER_LEN = 5, 5, 200
SESSION_BLOCKS = -(-NUM_TURNS * (QUESTION_LEN + ANSWER_LEN) // P)
"""Of one session at its end, in a group with full attention."""
TAIL_BLOCKS = blocks_in_window(WINDOW, P, STEP)


def hit_ratio_of_three_sessions(replica: Replica) -> float:
    """Conversations that take turns. Returns what was found of what could have been."""
    histories: list[list[int]] = [[], [], []]
    found = possible = 0
    for turn in range(NUM_TURNS):
        for number, history in enumerate(histories):
            prompt = history + text(QUESTION_LEN, seed=1000 * turn + number)
            name = f"{number}.{turn}"
            num_found = run(replica, name, prompt, max_tokens=ANSWER_LEN)
            if turn:
                found += num_found
                possible += whole_blocks(len(history) - 1)
            histories[number] = prompt + replica.output(name)
    replica.check_outputs()
    return found / possible


def test_three_sessions_keep_their_hits() -> None:
    """Scenario (a hybrid model elsewhere): with several sessions nothing was found, as what one session's window left
    behind pushed out what the others would have needed.

    The pool holds what sees everything, and of the windows no more than what is of use: a tail of each session. If all
    that windows leave behind is kept like other blocks, 13 % of the hits are lost.
    """
    replica = make_replica(num_blocks=3 * (SESSION_BLOCKS + TAIL_BLOCKS))
    assert hit_ratio_of_three_sessions(replica) >= 0.95


def test_three_sessions_keep_their_hits_where_all_layers_have_a_window() -> None:
    """In fewer blocks than a third of what one session's tokens would fill."""
    replica = make_replica((WINDOW,), num_blocks=3 * 2 * TAIL_BLOCKS, max_model_len=4 * SESSION_BLOCKS)
    assert 3 * 2 * TAIL_BLOCKS < SESSION_BLOCKS / 3
    assert hit_ratio_of_three_sessions(replica) >= 0.95


def test_a_common_prefix_is_found_from_the_third_prompt_on() -> None:
    """Scenario: one system prompt, many questions. Nobody knows where it ends until two prompts part there."""
    replica = make_replica(num_blocks=90)
    system = text(61)
    shared = whole_blocks(len(system))
    found = []
    for number in range(5):
        found.append(run(replica, str(number), system + text(50, seed=number), max_tokens=2))
        run_others(replica, seed=number)
    assert found[0] == 0
    assert found[2:] == [shared] * 3
    missed = replica.stats.num_missed_tokens
    assert missed[MissReason.WINDOW] == shared - found[1]
    replica.check_outputs()


def test_while_blocks_are_empty_a_prompt_may_part_anywhere() -> None:
    """What a window leaves behind is reused before other cached blocks, but not before empty ones."""
    replica = make_replica(num_blocks=2000)
    prompt = text(600)
    run(replica, "first", prompt, max_tokens=2)
    for cut in (570, 333, 100, 41):
        assert run(replica, f"cut {cut}", prompt[:cut] + text(30, seed=cut), max_tokens=1) == whole_blocks(cut)
    replica.check_outputs()


def test_regular_places_serve_a_prompt_that_parts_anywhere() -> None:
    """Of a long prompt whose blocks are under pressure, the window before each regular place is still there."""
    replica = make_replica(num_blocks=350, step=64)
    prompt = text(600)
    run(replica, "first", prompt, max_tokens=2)
    for number in range(4):
        run_others(replica, seed=number)
    parted = prompt[:400] + text(30, seed=1)
    stride = 8 * -(-WINDOW // P) * P
    assert run(replica, "parted", parted, max_tokens=1) >= 400 - stride
    replica.check_outputs()


@pytest.mark.parametrize("enable", [True, False], ids=["cache on", "cache off"])
def test_samples_that_start_late_are_not_given_what_is_gone(enable: bool) -> None:
    """One at a time: when the second sample starts, the first one has left the end of the prompt behind."""
    replica = Replica(
        num_blocks=120,
        block_size=P,
        windows=(0, WINDOW),
        max_num_seqs=1,
        max_num_batched_tokens=STEP,
        enable_prefix_caching=enable,
        vocab_size=VOCAB_SIZE,
    )
    replica.add("a", text(22), n=3, max_tokens=50, ignore_eos=True, temperature=1.0)
    replica.run()
    replica.check_outputs()


def test_a_sample_forks_while_the_window_holds_the_prompt_and_no_later() -> None:
    """Two places: the second sample forks at once; the third one comes when the first has gone on for long."""
    replica = make_replica(max_num_seqs=2)
    replica.add("a", text(22), n=3, max_tokens=50, ignore_eos=True, temperature=1.0)
    replica.add("b", text(5, seed=5), max_tokens=2)
    replica.run()
    replica.check_outputs()
