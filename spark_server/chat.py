"""`spark chat`: a conversation with a running server from the terminal; knows only its HTTP API."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import httpx
from rich.console import Console

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (gives input() line editing and a history)

DEFAULT_URL = "http://127.0.0.1:8000"
HELP = "/reset forgets the conversation, /exit ends, Ctrl-C stops an answer"
# A paste arrives at once; a typed line does not follow within this many seconds.
PASTE_SECONDS = 0.02


class ChatError(Exception):
    """The server cannot be reached or refused; the text is what the user sees."""


@dataclass(slots=True)
class Conversation:
    """Messages so far, and how to have the next one answered."""

    client: httpx.Client
    model: str
    system: str | None = None
    messages: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> Generator[str, None, None]:
        """Stream the answer to `text`; what arrived is kept even when the reader stops early.

        Raises:
            ChatError: no answer; the question is then forgotten, so that it can be asked again.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        body = {"model": self.model, "messages": self.messages, "stream": True}
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise ChatError(_refusal(answer))
                for line in answer.iter_lines():
                    for piece in _pieces(line):
                        pieces.append(piece)
                        yield piece
        except httpx.HTTPError as error:
            raise ChatError(f"the connection to the server broke ({error})") from error
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()


def _pieces(line: str) -> Iterator[str]:
    """Text of one line of the stream; tool calls are shown as the JSON that they are.

    Raises:
        ChatError: the line reports an error.
    """
    if not line.startswith("data:"):
        return
    data = line[5:].strip()
    if data == "[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        raise ChatError(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", []):
        delta = choice.get("delta", {})
        for key in ("reasoning_content", "content"):
            if delta.get(key):
                yield delta[key]
        for call in delta.get("tool_calls") or []:
            function = call.get("function", {})
            yield (function.get("name") or "") + (function.get("arguments") or "")


def _refusal(answer: httpx.Response) -> str:
    """What a status other than 200 means to a person."""
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.text.strip()[:200] or answer.reason_phrase
    return f"the server answered {answer.status_code}: {message}"


def _first_model(client: httpx.Client) -> str:
    try:
        answer = client.get("/v1/models", timeout=10.0)
    except httpx.HTTPError as error:
        raise ChatError(
            f"no server answers at {client.base_url} ({error}); start one with `serve` or name "
            "another with --url"
        ) from error
    if answer.status_code != 200:
        raise ChatError(_refusal(answer))
    models = answer.json().get("data") or []
    if not models:
        raise ChatError("the server lists no model yet")
    return str(models[0]["id"])


def _read_message(prompt: str) -> str:
    """One line, or several when they arrive at once as a paste does.

    Raises:
        EOFError: there is no more input.
    """
    lines = [input(prompt)]
    if sys.stdin.isatty():
        while select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
            try:
                lines.append(input())
            except EOFError:
                break
    return "\n".join(lines).strip()


def _say(conversation: Conversation, text: str, console: Console) -> bool:
    """Print the answer as it comes; False if there was an error instead."""
    answer = conversation.ask(text)
    try:
        for piece in answer:
            console.out(piece, end="", highlight=False)
            console.file.flush()
    except ChatError as error:
        console.out("", highlight=False)
        _complain(error)
        return False
    except KeyboardInterrupt:
        answer.close()
        console.out(" [stopped]", end="", style="dim", highlight=False)
    console.out("", highlight=False)
    return True


def _complain(error: ChatError) -> None:
    Console(stderr=True).print(str(error), style="red", markup=False, highlight=False)


def _talk(conversation: Conversation, console: Console) -> int:
    """Read and answer until the input ends; 1 if the last answer was an error."""
    typed = sys.stdin.isatty()
    if typed:
        console.print(f"{conversation.model}: {HELP}", style="dim", markup=False, highlight=False)
    fine = True
    while True:
        try:
            text = _read_message("> " if typed else "")
        except EOFError:
            break
        except KeyboardInterrupt:
            console.out("", highlight=False)
            console.print(HELP, style="dim", markup=False, highlight=False)
            continue
        if text == "/exit":
            break
        if text == "/reset":
            conversation.reset()
            console.print("forgotten", style="dim", highlight=False)
        elif text.startswith("/") and " " not in text and "\n" not in text:
            console.print(HELP, style="dim", markup=False, highlight=False)
        elif text:
            fine = _say(conversation, text, console)
    return 0 if fine else 1


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags of `spark chat`."""
    parser = argparse.ArgumentParser(
        prog="spark chat", description=f"Talk to a running server. {HELP}."
    )
    parser.add_argument("--url", default=DEFAULT_URL, help=f"default {DEFAULT_URL}")
    parser.add_argument("--model", help="default: the first one that the server lists")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"),
                        help="default: OPENAI_API_KEY")  # fmt: skip
    parser.add_argument("--system", help="a system message to begin with")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """`spark chat`: exit code 0, or 1 when the server could not answer."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    base = args.url.rstrip("/").removesuffix("/v1")
    # No read timeout: a busy server may let a request wait, and Ctrl-C is at hand.
    timeout = httpx.Timeout(None, connect=10.0)
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=timeout) as client:
            model = args.model or _first_model(client)
            return _talk(Conversation(client, model, args.system), Console())
    except (ChatError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        _complain(ChatError(str(error)))
        return 1
