"""`blockpilot generate`: answer one prompt, streamed.

With `--json` stdout holds one object with the keys of `JSON_KEYS`.
"""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockpilot.cli.console import OUT, emit_json, fail, note, number, say
from blockpilot.cli.measure import finished
from blockpilot.cli.options import (
    BUNDLED_TARGET,
    DeviceOption,
    DrafterOption,
    DTypeOption,
    Engine,
    JsonOption,
    MaxLengthOption,
    MaxNewTokensOption,
    MinPOption,
    PolicyOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    WeightsOption,
    sampling_params,
)

if TYPE_CHECKING:
    from blockpilot.output import Output
    from blockpilot.params import SamplingParams

JSON_KEYS = {
    "text": "the answer",
    "token_ids": "its ids",
    "prompt_tokens": "length of the prompt",
    "finish_reason": "stop, length, cancelled, deadline or error",
    "logprobs": "null, or token_id, logprob and top of each token",
    "seed": "reproduces the answer",
    "stats": "width, steps, committed, tau, offered, kept, acceptance_by_offset, time_to_first_token, "
    "decode_seconds and seconds by phase",
    "error": "null, or why the request failed",
    "exact": "whether the answer is promised to equal plain decoding bit for bit",
    "policy_calls": "how often the policy was asked",
}
ChatOption = Annotated[
    Path | None,
    typer.Option("--chat", help='JSON file: [{"role", "content"}, ...] or {"messages": [...]}.'),
]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help="Do not end at the model's own ids.")]
LogprobsOption = Annotated[
    int | None, typer.Option("--logprobs", help="Log-probabilities and n alternatives.")
]
WidthOption = Annotated[int | None, typer.Option("--width", help="Block width in place of the policy's.")]


def run(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; absent or -: read from stdin.")] = None,
    chat: ChatOption = None,
    target: TargetOption = BUNDLED_TARGET,
    drafter: DrafterOption = None,
    policy: PolicyOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Default: fresh entropy.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End at this text; repeatable.")] = None,
    ignore_eos: IgnoreEosOption = False,
    logprobs: LogprobsOption = None,
    width: WidthOption = None,
    dtype: DTypeOption = "float32",
    weights: WeightsOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    max_length: MaxLengthOption = None,
    json: JsonOption = False,
) -> None:
    """Answer one prompt, from the argument, stdin or a chat file. Statistics go to stderr."""
    engine = Engine.resolve(
        target,
        drafter,
        policy,
        dtype=dtype,
        weights=weights,
        device=device,
        threads=threads,
        max_length=max_length,
    )
    params = sampling_params(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        width=width,
    )
    _answer(engine, read_prompt(prompt, chat), params, json)


def _answer(engine: Engine, asked: str | list[dict[str, str]], params: SamplingParams, json: bool) -> None:
    with engine.open() as llm:
        stream = llm.stream(asked, params)
        for delta in stream:
            if not json:
                OUT.out(delta, end="", highlight=False)
                OUT.file.flush()
        output, calls = finished(stream), llm.policy_calls
    if json:
        emit_json(output.to_dict() | {"policy_calls": calls})
    else:
        say("")
        note(_summary(output))
    if output.error is not None:
        fail(f"the request failed: {output.error}")
        raise typer.Exit(1)


def read_prompt(prompt: str | None, chat: Path | None) -> str | list[dict[str, str]]:
    """The text or messages to answer; refuses none and both."""
    if chat is not None:
        if prompt is not None:
            raise ValueError("generate: expected a prompt or --chat, got both")
        return _read_chat(chat)
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            raise ValueError("generate: expected a prompt as argument, on stdin or as --chat FILE, got none")
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise ValueError("generate: expected a prompt, got an empty text")
    return prompt


def _read_chat(file: Path) -> list[dict[str, str]]:
    try:
        found: Any = jsonlib.loads(file.read_text(encoding="utf-8"))
    except jsonlib.JSONDecodeError as error:
        raise ValueError(f"{file}: expected JSON, got {error.msg} at line {error.lineno}") from error
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(f'{file}: expected messages, each with the strings "role" and "content"')
    return messages


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _summary(output: Output) -> str:
    stats = output.stats
    speed = stats.committed / stats.decode_seconds if stats.decode_seconds else None
    return (
        f"{len(output.token_ids)} tokens, {output.finish_reason}; "
        f"width {stats.width}, τ {number(stats.tau)}, {number(speed, 1)} tokens/s, "
        f"first token after {number(stats.time_to_first_token, 3)} s, seed {output.seed}"
    )
