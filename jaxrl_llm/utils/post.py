"""JSON posted to a server, again where a failure may pass."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
AGAIN = (408, 409, 429, 500, 502, 503, 504)  # statuses after which a request is made again


def posted(
    url: str, body: Any, read: Callable[[Any], T], *, headers: Mapping[str, str] | None = None,
    pauses: Sequence[float] = (), time_limit: float = 60.0,
) -> T:  # fmt: skip
    """What `read` finds in the server's reply to a body, both as JSON values.

    pauses: seconds before each repetition, which follows a status of AGAIN, a lost connection, and a reply that cannot
    be read. time_limit: seconds of an attempt. Raises RuntimeError, whose text is what the server said last.
    """
    sent = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), sent)
    for pause in (*pauses, None):
        try:
            with urllib.request.urlopen(request, timeout=time_limit) as reply:
                return read(json.load(reply))
        except urllib.error.HTTPError as error:
            why = f"status {error.code} {' '.join(error.read(300).decode(errors='replace').split())}".rstrip()
            if error.code not in AGAIN:
                break
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
        if pause is not None:
            time.sleep(pause)
    raise RuntimeError(why)
