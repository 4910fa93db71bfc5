"""Tell an interruption to a web address of the user's."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request

from dougong.event.kinds import WorkerLost

_TIMEOUT_S = 5.0


def send_webhook(url: str, *, run_id: str, event: WorkerLost) -> tuple[int, str]:
    """POST the interruption as JSON; (HTTP status, what happened). Never raises: a webhook must not hurt a job.

    `text` is there for chat services, the other fields for programs.
    """
    if not url.lower().startswith(("http://", "https://")):
        return 0, f"not reached: {url!r} is not an http or https address"
    body = {
        "text": f"Dougong run {run_id} interrupted: rank {event.rank} on {event.component}: {event.detail}",
        "run": run_id,
        "kind": "WorkerLost",
        "rank": event.rank,
        "component": event.component,
        "cause_class": event.cause_class,
        "detail": event.detail,
        "last_step": event.last_step,
    }
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return int(answer.status), "sent"
    except urllib.error.HTTPError as error:
        return error.code, str(error.reason)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return 0, f"not reached: {getattr(error, 'reason', error)}"
