"""Captions by servers with OpenAI's chat completions, several requests at once.

Errors and logs quote no request, whose headers have the key.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from io import BytesIO
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, StreamReader
from PIL import Image

from configs.checks import Finding, note
from configs.errors import Away, Failed, UserError
from configs.settings.caption import Endpoint
from tasks.caption.captioner import Answer, Decoding, Keep, Question
from tasks.caption.checks import clean
from tasks.download.fetch_with_retries import run
from tasks.download.http import retry_after
from tasks.secret_blocks import secret

SETTING = "caption.endpoint"
#: Variable of the environment, and Prefect's secret block, with the key.
KEY = "KILN_CAPTION_KEY"
BLOCK = "caption-key"
#: Statuses below 500 that may pass: a timeout, a conflict, too early, too many requests.
PASSING = {408, 409, 425, 429}
#: Maximum wait that a server can ask for, in seconds.
MAX_WAIT = 600.0
#: Seconds for which a server without a connection gets no request if there are others.
REST = 30.0
#: Maximum bytes of an answer.
MAX_ANSWER = 2**20
QUOTED = 200  # characters of an error's text


def key_of(model: str) -> str | None:
    """The key of the servers, for the recipe that publishes a model; None: there is none."""
    return secret(KEY, BLOCK, model)


class _Passing(Exception):
    """A request failed in a way that may pass."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait  # seconds that the server asks for


class EndpointCaptioner:
    """Asks servers for captions; thread-safe.

    Servers share the requests: each goes to the one with the fewest under way.

    Args:
        prompts: name -> prompt.
        key: of the servers; None: they need none.
    """

    def __init__(
        self, settings: Endpoint, decoding: Decoding, prompts: Mapping[str, str], key: str | None
    ) -> None:
        self._settings = settings
        self._decoding = decoding
        self._prompts = prompts
        self._key = key
        self._connections = asyncio.Semaphore(settings.max_connections)
        self._under_way = dict.fromkeys(settings.urls, 0)
        self._rests_until = dict.fromkeys(settings.urls, 0.0)
        self._requests = 0

    def caption(self, questions: Iterable[Question], keep: Keep) -> None:
        """See Captioner. An answer is None if servers answer about other pictures alone.

        Raises:
            Away: no server answers.
            Failed: a server refuses a request for good, or the budget of requests is spent.
        """
        run(self._caption(questions, keep))

    async def _caption(self, questions: Iterable[Question], keep: Keep) -> None:
        room = asyncio.Semaphore(2 * self._settings.max_connections)  # pictures in memory
        errors: list[Exception] = []

        async def ask(question: Question, picture: str, name: str) -> None:
            try:
                if not errors:
                    keep(question.row, name, await self._answer(session, picture, name))
            except UserError as error:
                errors.append(error)
            room.release()

        remaining = iter(questions)

        def following() -> Question | None:
            try:
                return next(remaining, None)
            except Exception as error:  # of the image shard
                errors.append(error)
                return None

        async with (
            _session(self._settings, self._key) as session,
            asyncio.TaskGroup() as requests,  # those under way end before an error is raised
        ):
            while not errors and (question := await asyncio.to_thread(following)):
                picture = await asyncio.to_thread(data_url, question.picture)
                for name in question.prompts:
                    await room.acquire()
                    requests.create_task(ask(question, picture, name))
        if errors:
            raise errors[0]

    def _body(self, picture: str, name: str) -> bytes:
        image = {"type": "image_url", "image_url": {"url": picture}}
        content = [image, {"type": "text", "text": self._prompts[name]}]
        request = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": self._decoding.temperature,
            "seed": self._decoding.seed,
            "max_tokens": self._decoding.max_new_tokens,
        }
        return json.dumps(request).encode()

    async def _answer(self, session: ClientSession, picture: str, name: str) -> Answer | None:
        """The answer to a request, after retries. Raises Away or Failed."""
        body = self._body(picture, name)
        for attempt in range(self._settings.retries + 1):
            try:
                return await self._ask(session, self._least_busy(), body)
            except _Passing as error:
                # Jitter: without it all retries reach an overloaded server at one moment.
                own = self._settings.backoff * 2**attempt * random.uniform(0.75, 1.25)
                wait = max(own, min(error.wait, MAX_WAIT))
            if attempt < self._settings.retries:
                await asyncio.sleep(wait)
        await self._check_alive(session, name)
        return None

    async def _check_alive(self, session: ClientSession, name: str) -> None:
        """Return if a server answers about a plain picture; raise Away if none does."""
        plain = self._body(data_url(Image.new("RGB", (64, 64), "grey")), name)
        why = ""
        for url in self._settings.urls:
            try:
                await self._ask(session, url, plain)
            except _Passing as error:
                why = f"{url}: {error}"
            else:
                return
        raise Away(
            f"no server answers ({why}); captions so far are kept",
            setting=SETTING,
            remedy="start the servers, or correct their URLs, then run again",
        )

    def _least_busy(self) -> str:
        now = time.monotonic()
        return min(
            self._settings.urls,
            key=lambda url: (self._rests_until[url] > now, self._under_way[url]),
        )

    async def _ask(self, session: ClientSession, url: str, body: bytes) -> Answer:
        """The answer of one request. Raises _Passing or Failed."""
        budget = self._settings.max_requests
        if budget is not None and self._requests >= budget:
            raise Failed(
                f"the budget of {budget} requests is spent; captions so far are kept",
                setting=f"{SETTING}.max_requests",
                remedy="raise it, or run again",
            )
        self._requests += 1
        place = f"{url.rstrip('/')}/chat/completions"
        content_type = {"Content-Type": "application/json"}
        post = partial(session.post, place, headers=content_type, allow_redirects=False)
        self._under_way[url] += 1
        try:
            async with self._connections, post(data=body) as response:
                data = await _read(response.content)
        except (ClientError, TimeoutError) as error:
            self._rests_until[url] = time.monotonic() + REST
            raise _Passing(type(error).__name__) from None
        finally:
            self._under_way[url] -= 1
        if response.status == 200:
            return _parsed(data)
        if response.status in PASSING or response.status >= 500:
            raise _Passing(f"status {response.status}", retry_after(response.headers))
        said = clean(data.decode(errors="replace")).replace(self._key or "\0", "...")[:QUOTED]
        raise Failed(
            f"{url} refuses a request with status {response.status}: {said}",
            setting=SETTING,
            remedy="correct its URL, model or key",
        )


def check_endpoint(settings: Endpoint, key: str | None) -> Iterator[Finding]:
    """Notes on servers that do not answer, or not with this key; earlier captions need neither."""
    for url, answer in run(_statuses(settings, key)):
        if not isinstance(answer, int):
            yield note(f"{SETTING}: {url} does not answer ({answer})", "start it")
        elif answer in (401, 403):
            what = f"{SETTING}: {url} does not accept the key (status {answer})"
            yield note(what, f"set {KEY}, or Prefect's secret block {BLOCK}")


async def _statuses(settings: Endpoint, key: str | None) -> list[tuple[str, int | str]]:
    """(URL, status of its list of models or name of the error) of each server."""
    statuses: list[tuple[str, int | str]] = []
    async with _session(settings, key) as session:
        for url in settings.urls:
            place = f"{url.rstrip('/')}/models"
            try:
                async with session.get(place, allow_redirects=False) as response:
                    statuses.append((url, response.status))
            except (ClientError, TimeoutError) as error:
                statuses.append((url, type(error).__name__))
    return statuses


def _session(settings: Endpoint, key: str | None) -> ClientSession:
    """A client that shows the key to servers alone, not to a proxy of the environment."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = ClientTimeout(total=settings.timeout)
    return ClientSession(headers=headers, timeout=timeout, trust_env=False)


async def _read(content: StreamReader) -> bytes:
    """The body. Raises _Passing if it is longer than MAX_ANSWER."""
    data = bytearray()
    async for chunk in content.iter_chunked(2**16):
        data += chunk
        if len(data) > MAX_ANSWER:
            raise _Passing("its answer is too long")
    return bytes(data)


def _parsed(data: bytes) -> Answer:
    """The caption in an answer. Raises _Passing if it has none."""
    try:
        choice: Any = json.loads(data)["choices"][0]
        text = choice["message"]["content"] or ""
        if not isinstance(text, str):
            raise TypeError
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _Passing("its answer is no chat completion") from None
    return Answer(text, choice.get("finish_reason") == "length")


def data_url(picture: Image.Image) -> str:
    """An RGB picture as a JPEG in a data URL."""
    picture.save(buffer := BytesIO(), "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
