"""The API of a Kubernetes cluster and the logs of its pods, by the client of Prefect's workers.

Objects are JSON as in the API reference, kubernetes.io/docs/reference/kubernetes-api. The client is
asynchronous: it runs on a thread, which callers wait for.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from artifacts.errors import retrying
from configs.errors import Away, Refused

T = TypeVar("T")
Object = dict[str, Any]
REQUEST_SECONDS = 30.0  # timeout of a request
#: Waits before the tries of a request that changes nothing if it is repeated.
WAITS = (1.0, 2.0, 4.0)
#: A log without a line for so long is opened again; agents write one each second.
STALE_SECONDS = 10.0
RECONNECT_SECONDS = 1.0
LOG_CONNECT_SECONDS = 10.0


class Missing(Exception):
    """The object does not exist."""


class KubernetesApi:
    """Requests to one cluster.

    The cluster is that of the kubeconfig ($KUBECONFIG or ~/.kube/config), or, in a pod, its own.

    Args:
        context: of the kubeconfig; None: its current one.

    Raises:
        Refused: the client is not installed, or neither a kubeconfig nor a pod names a cluster.
    """

    def __init__(self, context: str | None = None) -> None:
        if find_spec("kubernetes_asyncio") is None:
            raise Refused("kubernetes: it needs kubernetes_asyncio: make setup-kubernetes")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client: Any = self._run(_connect(context)).result()

    def get(self, path: str, **query: str) -> Object:
        """GET. Raises as `post`, and Missing."""
        return self._patiently(lambda: self._request("GET", path, query))

    def delete(self, path: str, **query: str) -> None:
        """DELETE; an object that does not exist is no error. Raises as `post`."""
        with suppress(Missing):
            self._patiently(lambda: self._request("DELETE", path, query))

    def post(self, path: str, body: Object, **query: str) -> Object:
        """POST.

        Raises:
            Away: the API server does not answer, or asks to wait.
            Refused: it does not accept the request, or the caller may not make it.
            Missing: the object, or its namespace, does not exist.
        """
        return self._request("POST", path, query, body)

    def follow(self, path: str, on_line: Callable[[str], None]) -> Future[None]:
        """Read a pod's log to its end, over lost connections, each line once.

        Args:
            path: of the pod, whose only container has started.
            on_line: called in the client's thread.

        Returns:
            It is done when the log has ended, or the pod is gone.
        """
        return self._run(_PodLog(self._client, path, on_line).follow())

    def close(self) -> None:
        """End all requests; a second call does nothing."""
        if not self._thread.is_alive():
            return

        async def end() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await self._client.close()

        self._run(end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _request(self, method: str, path: str, query: Object, body: Object | None = None) -> Object:
        return self._run(_ask(self._client, method, path, query, body)).result()

    def _patiently(self, work: Callable[[], T]) -> T:
        return retrying(work, WAITS, words="kubernetes: {}".format)

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


async def _connect(context: str | None) -> Any:
    from kubernetes_asyncio import client, config

    configuration = client.Configuration()
    configuration.connection_pool_maxsize = 0  # unlimited: each host has an open log
    file = Path(os.environ.get("KUBECONFIG") or "~/.kube/config").expanduser()
    try:
        if file.is_file():
            await config.load_kube_config(
                config_file=str(file), context=context, client_configuration=configuration
            )
        else:
            config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException as error:
        raise Refused(
            f"no cluster is known here ({error}): set KUBECONFIG, or run in a pod",
            setting="kubernetes",
        ) from None
    return client.ApiClient(configuration)


async def _ask(
    client: Any, method: str, path: str, query: Object, body: Object | None = None
) -> Object:
    """The answer to a request. Raises as `KubernetesApi.post`."""
    import aiohttp

    try:
        response = await _open(client, method, path, query, body, REQUEST_SECONDS)
        async with response:
            text = await response.text(errors="replace")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Away(f"the API server does not answer: {error or type(error).__name__}") from None
    if response.status < 300:
        return dict(json.loads(text))
    raise _failure(response.status, text)


def _failure(status: int, text: str) -> Exception:
    try:
        message = json.loads(text)["message"]
    except (ValueError, TypeError, KeyError):
        message = " ".join(text.split())[:500]
    if status == 404:
        return Missing(message)
    if status == 429 or status >= 500:
        return Away(f"the API server answers {status}: {message}")
    return Refused(f"the API server answers {status}: {message}", setting="kubernetes")


async def _open(
    client: Any, method: str, path: str, query: Object, body: Object | None, timeout: Any
) -> Any:
    """The response to a request, whose body is not read yet."""
    return await client.call_api(
        path,
        method,
        query_params=list(query.items()),
        header_params={"Accept": "application/json, */*"},
        body=body,
        auth_settings=["BearerToken"],
        _preload_content=False,
        _request_timeout=timeout,
    )


class _PodLog:
    """The log of a pod's container, from where the last connection ended."""

    def __init__(self, client: Any, path: str, on_line: Callable[[str], None]) -> None:
        self._client = client
        self._path = path
        self._on_line = on_line
        self._last = ""  # time of the last line, in a form that can be compared
        self._taken = 0  # lines of that time

    async def follow(self) -> None:
        """Read to the end of the container, or of the pod."""
        while True:
            try:
                is_over = await self._is_over()
                if await self._read(is_over) and is_over:
                    return
            except Missing:
                return
            except (Away, Refused):  # such as a node that does not answer
                pass
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _is_over(self) -> bool:
        pod = await _ask(self._client, "GET", self._path, {})
        return any("terminated" in one["state"] for one in statuses(pod))

    async def _read(self, is_over: bool) -> bool:
        """Read what follows; whether the connection was not lost. Raises as `KubernetesApi.post`.

        Args:
            is_over: whether the container has ended, so that an incomplete line is its last one.
        """
        import aiohttp

        query = {"follow": "true", "timestamps": "true"}
        if self._last:
            query["sinceTime"] = f"{self._last[:19]}Z"  # the API reads whole seconds
        timeout = aiohttp.ClientTimeout(sock_connect=LOG_CONNECT_SECONDS, sock_read=STALE_SECONDS)
        skip = _Repeated(self._last, self._taken)
        try:
            response = await _open(self._client, "GET", f"{self._path}/log", query, None, timeout)
            async with response:
                if response.status >= 300:
                    raise _failure(response.status, await response.text(errors="replace"))
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        self._take(line, skip)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        if rest and is_over:
            self._take(rest, skip)
        return True

    def _take(self, line: bytes, skip: _Repeated) -> None:
        time, _, text = line.decode(errors="replace").partition(" ")
        time = comparable(time)
        if skip(time):
            return
        self._taken = self._taken + 1 if time == self._last else 1
        self._last = time
        self._on_line(text)


class _Repeated:
    """Whether a line came before: the API goes back to the start of a second.

    Args:
        last: time of the last line that was taken.
        taken: number of lines of that time.
    """

    def __init__(self, last: str, taken: int) -> None:
        self._last = last
        self._left = taken

    def __call__(self, time: str) -> bool:
        if time == self._last and self._left:
            self._left -= 1
            return True
        return time < self._last


def comparable(time: str) -> str:
    """A time in RFC 3339, whose trailing zeros are left out, with nine decimals, without its Z."""
    whole, _, decimals = time.rstrip("Z").partition(".")
    return f"{whole}.{decimals:0<9}"


def statuses(pod: Object) -> list[Object]:
    """The statuses of a pod's containers; empty before it has a node."""
    return list(pod.get("status", {}).get("containerStatuses", ()))
