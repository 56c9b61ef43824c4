"""Prompts for a real chat model: many kinds of text, of many lengths."""

import random
from typing import Any

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "Write one sentence about the sea."}],
    [{"role": "user", "content": "List three prime numbers."}],
    [
        {"role": "system", "content": "You answer in one short sentence, like a pirate."},
        {"role": "user", "content": "Where do you live?"},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
]
TEXTS = [
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "SELECT name, count(*) FROM users\nWHERE age > 30\nGROUP BY",
    '{"name": "pagoda", "tiers": ["device", "host", "disk"], "block_size":',
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "1 2 3 4 5 6 7 8 9 10 11 12 13",
    "北京是中华人民共和国的首都，也是",
    "العاصمة الفرنسية هي باريس، وهي مدينة",
    "Столица России - Москва. Этот город",
    "日本の首都は東京です。人口は",
    "I love you 😍🎉🚀 👩‍👩‍👧‍👦 flags: 🇫🇷🇯🇵 🙂🙃",
    "    \n\n\t\n  ",
]
LONG_LENGTHS = (640, 1487)
"""Tokens: whole blocks of 16, and one token short of that."""


def long_text(seed: int) -> str:
    """A made-up log of more than 1,500 tokens."""
    drawn = random.Random(seed)
    people, places = (
        ("Ada", "Grace", "Alan", "Edsger", "Barbara"),
        ("harbour", "library", "market", "station", "museum"),
    )
    return "\n".join(
        f"Day {day}: {drawn.choice(people)} went to the {drawn.choice(places)} at {drawn.randrange(6, 22)} o'clock, "
        f"met {drawn.randrange(2, 90)} people and wrote down number {drawn.randrange(1000)}."
        for day in range(1, 60)
    )


def token_prompts(tokenizer: Any) -> list[tuple[int, ...]]:
    """All prompts as token ids, shortest kinds first."""
    single = [(tokenizer.bos_token_id,), tuple(tokenizer.encode("Once")[:1])]
    chats = [
        tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        for chat in CHATS
    ]
    texts = [tuple(tokenizer.encode(text)) for text in TEXTS]
    long = [tuple(tokenizer.encode(long_text(seed))[:length]) for seed, length in enumerate(LONG_LENGTHS)]
    assert [len(prompt) for prompt in long] == list(LONG_LENGTHS)
    return [*single, *chats, *texts, *long]
