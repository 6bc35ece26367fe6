"""`blockpilot demo`: the bundled target, drafter and policy at work, beside plain decoding.

With `--json` stdout holds one object with the keys of `JSON_KEYS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockpilot.cli import measure
from blockpilot.cli.console import OUT, emit_json, note, number, progress, say, table
from blockpilot.cli.machine import hardware, versions
from blockpilot.cli.options import (
    BUNDLED_TARGET,
    DTypeOption,
    Engine,
    JsonOption,
    MaxNewTokensOption,
    TemperatureOption,
    ThreadsOption,
    WeightsOption,
    sampling_params,
)
from blockpilot.cli.prompts import Prompt, load_prompts

if TYPE_CHECKING:
    from blockpilot.llm import LLM
    from blockpilot.params import SamplingParams

SHOWN = ("word_problem/1", "python_function/1", "rewriting/1")
LABELS = {"plain": "plain", "spec": "speculative"}
JSON_KEYS = {
    "identical": "every speculative answer equals plain decoding",
    "first_difference": "null, or the prompt id and token index of the first difference",
    "tau": "tokens committed by steps / steps",
    "width": "block width of each prompt",
    "policy_calls": "policy calls of each prompt",
    "plain_tokens_per_s": "tokens committed by steps per second, plain",
    "spec_tokens_per_s": "the same, speculative, policy included",
    "speedup": "their ratio, null unless identical",
    "acceptance_by_offset": "kept / offered drafted tokens at offset 1, 2, ...",
    "ttft": "mean seconds to first token, plain and spec",
    "seconds": "seconds by phase, plain and spec",
    "errors": "requests that failed",
    "prompts": "id, prompt, text, width, tau and finish_reason of each",
    "settings": "what was asked for",
    "versions": "software",
    "hardware": "machine",
}
PolicyChoice = Annotated[str, typer.Option("--policy", help="bundled, predictor, fixed:N or a policy file.")]
SeedChoice = Annotated[int, typer.Option("--seed", help="Seed of the answers when sampling.")]


def run(
    policy: PolicyChoice = "bundled",
    max_new_tokens: MaxNewTokensOption = 64,
    dtype: DTypeOption = "float32",
    weights: WeightsOption = "auto",
    temperature: TemperatureOption = 0.0,
    seed: SeedChoice = 0,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Stream three answers, then decode them plain and speculatively; the last line says `identical`.

    Exit code 1 if any answer differs.
    """
    engine = Engine.resolve(BUNDLED_TARGET, None, policy, dtype=dtype, weights=weights, threads=threads)
    params = sampling_params(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    prompts = [prompt for prompt in load_prompts(()) if prompt.id in SHOWN]
    note("loading SmolLM2-135M-Instruct, the bundled drafter and the policy")
    with engine.open() as llm:
        llm.warmup()
        streamed = [_stream(llm, prompt, params, quiet=json) for prompt in prompts]
        plain, spec = _both(llm, prompts, params)
    report = _report(prompts, streamed, plain, spec)
    asked = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    report |= {
        "settings": engine.to_dict() | asked,
        "versions": versions(),
        "hardware": hardware(threads),
    }
    emit_json(report) if json else _print(report)
    if not report["identical"]:
        raise typer.Exit(1)


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams, quiet: bool) -> dict[str, Any]:
    """Decode one prompt with its answer shown as it grows; count the policy's calls."""
    before = llm.policy_calls
    if not quiet:
        say(f"\n{prompt.prompt}", style="bold")
    stream = llm.stream(prompt.prompt, measure.params_for(prompt, params, measure.POLICY))
    for delta in stream:
        if not quiet:
            OUT.out(delta, end="", highlight=False)
    output, calls = measure.finished(stream), llm.policy_calls - before
    if not quiet:
        times = "once" if calls == 1 else f"{calls} times"
        tau = number(output.stats.tau)
        line = f"\nwidth {output.stats.width}, policy called {times}, τ {tau}, {output.finish_reason}"
        say(line, style="cyan")
    return {"text": output.text, "policy_calls": calls, **measure.record(output)}


def _both(
    llm: LLM, prompts: list[Prompt], params: SamplingParams
) -> tuple[list[measure.Record], list[measure.Record]]:
    """Every prompt plain and speculatively, in turns so that both meet the same load."""
    arms = {measure.PLAIN: list[measure.Record](), measure.POLICY: list[measure.Record]()}
    with progress("plain and speculative", total=2 * len(prompts)) as advance:
        for i, prompt in enumerate(prompts):
            for arm in list(arms) if i % 2 == 0 else reversed(arms):
                arms[arm] += measure.decode(llm, [prompt], params, arm)
                advance()
    return arms[measure.PLAIN], arms[measure.POLICY]


def _report(
    prompts: list[Prompt],
    streamed: list[dict[str, Any]],
    plain: list[measure.Record],
    spec: list[measure.Record],
) -> dict[str, Any]:
    figures = measure.summarise(plain, spec)
    difference = None
    for prompt, a, *others in zip(prompts, plain, spec, streamed, strict=True):
        for other in others:
            index = measure.first_difference(a, other)
            if index is not None and difference is None:
                difference = {"id": prompt.id, "token": index}
    figures["identical"] = difference is None
    figures["first_difference"] = difference
    figures["policy_calls"] = [s["policy_calls"] for s in streamed]
    figures["prompts"] = [
        {
            "id": prompt.id,
            "prompt": prompt.prompt,
            "text": s["text"],
            "width": r["stats"]["width"],
            "tau": r["stats"]["tau"],
            "finish_reason": r["finish_reason"],
        }
        for prompt, s, r in zip(prompts, streamed, spec, strict=True)
    ]
    return figures


def _print(report: dict[str, Any]) -> None:
    say("")
    title = f"{len(report['prompts'])} prompts, {report['hardware']['cpu']}"
    tau = {"plain": "1.00", "spec": number(report["tau"])}
    width = {"plain": "1", "spec": " ".join(map(str, report["width"]))}
    rows = [
        [
            label,
            number(report[f"{arm}_tokens_per_s"], 1),
            tau[arm],
            width[arm],
            number(report["ttft"][arm], 3),
        ]
        for arm, label in LABELS.items()
    ]
    table(title, rows, left=("",), right=("tokens/s", "τ", "width per prompt", "first token s"))
    seconds = report["seconds"]
    phases = [phase for phase in seconds["spec"] if phase != "prefill"]
    rows = [[label, *(number(seconds[arm][p], 3) for p in phases)] for arm, label in LABELS.items()]
    table("time by phase", rows, left=("seconds in",), right=phases)
    rates = " ".join(number(rate) for rate in report["acceptance_by_offset"])
    say(f"accepted at offset 1, 2, …: {rates or '-'}; τ is tokens committed by steps / steps")
    if report["speedup"] is not None:
        say(f"speculative / plain: {report['speedup']:.2f}")
        if report["speedup"] < 1:
            say("drafting did not pay in this run; where bench agrees, decode plainly with --drafter none")
    difference = report["first_difference"]
    if difference is None:
        say("identical: yes", style="bold green")
    else:
        where = f"first difference in {difference['id']} at token {difference['token']}"
        say(f"identical: NO, {where}", style="bold red")
