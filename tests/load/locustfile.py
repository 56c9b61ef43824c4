"""The chat workload for those who use Locust: `locust -f tests/load/locustfile.py --host http://127.0.0.1:8000`.

Each user holds conversations of several turns, with one of a few system prompts. POST ends with the whole answer,
"first token" with its first text.
"""

import random
import time
from typing import Any

from locust import HttpUser, task
from requests import RequestException

from pagoda.cluster.loadtest.openai_target import take_event
from pagoda.cluster.loadtest.target import Answer, SendError
from pagoda.cluster.loadtest.workloads import ChatWorkload
from pagoda.cluster.openai_stream import EventSplitter

TIMEOUT_S = 600.0
SESSIONS = ChatWorkload().sessions(seed=random.randrange(2**31))
"""All users take from here, so that no two hold the same conversation."""


class ChatUser(HttpUser):
    """Somebody who talks."""

    model = ""

    def on_start(self) -> None:
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    @task
    def conversation(self) -> None:
        session = next(SESSIONS)
        messages = [{"role": "system", "content": session.system}] if session.system else []
        for turn in session.turns:
            time.sleep(turn.pause_s)
            messages.append({"role": "user", "content": str(turn.prompt)})
            text = self.ask(messages, turn.max_tokens)
            if text is None:
                return
            messages.append({"role": "assistant", "content": text})

    def ask(self, messages: list[dict[str, str]], max_tokens: int) -> str | None:
        """The answer; None if there is none."""
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "stream": True, "temperature": 0}
        answer, begin = Answer(), time.monotonic()
        path = "/v1/chat/completions"
        with self.client.post(path, json=body, stream=True, timeout=TIMEOUT_S, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}")
                return None
            try:
                self.read(response, answer)
            except SendError as error:
                response.failure(f"{error.kind}: {error.detail}")
                return None
            except RequestException as error:
                response.failure(f"reset: {error}")
                return None
            if answer.finish_reason is None:
                response.failure("cut: ended without a finish reason")
                return None
            response.request_meta["response_time"] = (time.monotonic() - begin) * 1e3  # else it ends with the head
        self.environment.events.request.fire(
            request_type="SSE",
            name="first token",
            response_time=(answer.piece_s[0] - begin) * 1e3,
            response_length=0,
            exception=None,
            context={},
        )
        return "".join(answer.text)

    @staticmethod
    def read(response: Any, answer: Answer) -> None:
        splitter = EventSplitter()
        for data in response.iter_content(None):
            for event in splitter.feed(data):
                if take_event(event, answer, time.monotonic()):
                    return
        if splitter.rest.strip():
            take_event(splitter.rest, answer, time.monotonic())
