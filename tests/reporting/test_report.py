"""The report: complete and empty runs, escaping, shading, size, and no request to the network."""

import html
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sample_runs import write_run

from jaxrl_llm.reporting.html import shading
from jaxrl_llm.reporting.html.curves import DARK, LIGHT
from jaxrl_llm.reporting.html.report import write_report
from jaxrl_llm.reporting.html.shading import shade
from jaxrl_llm.reporting.logging.logged import logged_batch
from jaxrl_llm.utils.errors import InputError

pytest.importorskip("matplotlib")
VOID = {"meta", "br", "input", "link", "img", "hr", "wbr"}


class Page(HTMLParser):
    """Collects text, tags with attributes, and token elements; checks that tags are closed in order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.open, self.text, self.svgs, self.goes_on = [], [], [], 0, False
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.svgs += tag == "svg"
        self.goes_on = tag == "wbr"  # which is within a word
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            if self.goes_on:
                self.text[-1] += data
            else:
                self.text.append(data)
            self.goes_on = False

    @property
    def visible(self):
        return re.sub(r"\s+", " ", " ".join(self.text))


def report(folder):
    """The page of a run folder, checked for what must hold of every page."""
    path = write_report(folder)
    assert path == folder / "report.html"
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 5_000_000
    page = Page(text)
    allowed = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\s\"'<>)]+", text)) <= allowed
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        target = attributes.get("href") or attributes.get("xlink:href")
        assert target is None or (target.startswith("#") and target[1:] in ids)
        assert not {"src", "onclick", "onload"} & attributes.keys()
    for target in re.findall(r"url\(([^)]*)\)", text):
        assert target.strip("#\"'") in ids
    return page


def token_titles(page):
    """The numbers of the shaded tokens; legends and squares have titles too."""
    return [a["title"] for tag, a in page.tags if tag == "i" and "logp" in a.get("title", "")]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sample(step=0, phase="train", prompt_id=0, number=0, reward=1.0, tokens=("The", " answer"), **more):
    row = {"step": step, "phase": phase, "prompt_id": prompt_id, "sample": number, "prompt": f"Question {prompt_id}?"}
    row |= {"tokens": list(tokens), "advantage": None, "logp": None, "entropy": None, "reward": reward}
    return row | {"rewards": {"correct": reward}, "answer": None, "truncated": False} | more


def test_a_full_run(tmp_path):
    config = {"model": "tiny", "task": {"name": "sums", "digits": 2}, "seed": 11, "algorithm": {"name": "grpo"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    evaluation = {"accuracy": 0.25, "low": 0.125, "high": 0.4, "prompts": 40}
    summary = {"eval_before": evaluation, "eval_after": evaluation | {"accuracy": 0.75, "low": 0.6, "high": 0.86}}
    summary |= {"tokens": {"sampled": 123456}, "seconds": {"sample": 30.0, "update": 90.0}, "goodput": 0.8}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    keys = ("reward/mean", "reward/std", "kl", "entropy", "completion/length", "clip/high", "gradient_norm")
    keys += ("learning_rate", "mismatch/kl", "goodput", "odd/one")
    lines(tmp_path / "metrics.jsonl", ({"step": i, **{key: i / 8 for key in keys}} for i in range(9)))
    values = {"advantage": [0.5, -0.5], "logp": [-0.25, -2.0], "entropy": [0.0, 1.5]}
    rows = [sample(step, "train", 3, number, reward=number, **values) for step in range(8) for number in range(2)]
    rows += [sample(0, "eval_before", i, reward=0.0) for i in range(5)]
    rows += [sample(9, "eval_after", i, reward=float(i > 1), answer="forty-two") for i in range(5)]
    lines(tmp_path / "completions.jsonl", rows)
    page = report(tmp_path)
    for text in ("tiny", "sums", "grpo", "11", "25.0%", "12.5 to 40.0", "75.0%", "of 40 prompts", "123,456"):
        assert text in page.visible
    assert "sample 30 s (25%)" in page.visible
    assert "update 90 s (75%)" in page.visible
    assert "Goodput 80%" in page.visible
    # Nine known metrics (the deviation is not one of them), one other, two distributions, pass@k of groups of two.
    assert "All other metrics (1)" in page.visible
    assert page.svgs == 9 + 1 + 2 + 1
    assert "Mismatch of sampler and trainer mismatch/kl last 1 " in page.visible
    assert "Clip fraction clip/high last 1 " in page.visible
    assert "steps 0 to 1" in page.visible
    assert "steps 6 to 7" in page.visible
    assert "rose on 3, stayed on 2 of 5 prompts" in page.visible
    assert "forty-two" in page.visible
    steps = re.findall(r"Step (\d)", page.visible)
    assert (steps[0], steps[-1], len(steps)) == ("0", "7", 8)
    titles = token_titles(page)
    assert titles[:2] == ["advantage 0.500, logp -0.250, entropy 0.000", "advantage -0.500, logp -2.000, entropy 1.500"]
    classes = [attributes["class"] for tag, attributes in page.tags if "logp" in attributes.get("title", "")]
    assert classes[:2] == ["a6 l-1", "a-6 l-6 e6"]  # 6 levels up to the range: 0.5, 2 and 1.5; 0.25 / 2 * 6 rounds to 1
    radios = [a["value"] for tag, a in page.tags if a.get("name") == "shade-train"]
    assert radios == ["advantage", "logp", "entropy"]


def test_the_verdict_and_the_warnings_come_first(tmp_path):
    write_run(tmp_path / "run")
    page = report(tmp_path / "run")
    assert page.visible.index("Held-out accuracy rose from") < page.visible.index("Entropy fell from")
    assert page.visible.index("Entropy fell from") < page.visible.index("smollm2-135m")
    assert "groups without signal" in page.visible
    kinds = [a["class"] for tag, a in page.tags if tag == "section" and "verdict" in a.get("class", "")]
    assert kinds == ["verdict better"]
    titles = [chart["unit"] for chart in charts(page)][:3]
    assert titles == ["reward", "share", "nats per token"]


def test_the_matrix_counts_all_prompts_and_has_examples_of_each(tmp_path):
    write_run(tmp_path / "run", prompts=200, before=0.4, after=0.6)
    page = report(tmp_path / "run")
    counts = re.findall(r"(\d+) (right both times|broken|fixed|still wrong) \d+%", page.visible)
    assert len(counts) == 4
    squares = [a["class"] for tag, a in page.tags if tag == "i" and a.get("title", "").startswith("prompt ")]
    assert len(squares) == 200
    for (count, words), kind in zip(counts, ("right", "broken", "fixed", "wrong"), strict=True):
        assert squares.count(f"o-{kind}") == int(count) > 0
        assert f"{min(6, int(count))} of {count} {words}" in page.visible
        cards = [a for tag, a in page.tags if tag == "article" and a["data-kind"] == kind and "data-step" not in a]
        assert len(cards) == min(6, int(count))


def test_rewards_that_mark_nothing_as_correct_are_compared_by_their_change(tmp_path):
    rows = [sample(0, "eval_before", i, reward=0.25 * (i % 2)) for i in range(4)]
    rows += [sample(1, "eval_after", i, reward=0.5 * (i < 2)) for i in range(4)]
    lines(tmp_path / "completions.jsonl", rows)
    page = report(tmp_path)
    assert [a["data-kind"] for tag, a in page.tags if tag == "article"] == ["rose", "rose", "fell", "stayed"]
    assert "rose on 2, fell on 1, stayed on 1 of 4 prompts" in page.visible


def test_settings_that_differ_from_the_defaults_come_before_the_others(tmp_path):
    config = {"steps": 9, "optimizer": {"learning_rate": 1e-4, "beta1": 0.9}, "rewards": ["a"], "output": "x", "own": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = {"steps": 100, "optimizer": {"learning_rate": 1e-4, "beta1": 0.8}, "rewards": ("a",), "output": "runs"}
    write_report(tmp_path, defaults=lambda config: known)
    page = Page((tmp_path / "report.html").read_text())
    table = page.visible[page.visible.index("Settings that differ") : page.visible.index("All settings")]
    assert "steps 9 100" in table
    assert "optimizer.beta1 0.9 0.8" in table
    for same in ("learning_rate", "rewards", "output", "own"):
        assert same not in table


def test_shading_begins_with_what_there_is_to_shade(tmp_path):
    """Advantages that are all 0 shade nothing; held-out completions have none."""
    values = {"advantage": [0.0, 0.0], "logp": [-0.25, -2.0], "entropy": [0.0, 1.5]}
    rows = [sample(0, number=n, **values) for n in range(2)] + [sample(0, "eval_after", logp=[-1.0, -2.0])]
    lines(tmp_path / "completions.jsonl", rows)
    page = report(tmp_path)
    shown = {a["id"]: a["class"] for tag, a in page.tags if tag == "section" and "id" in a}
    assert shown == {"held-out": "show-logp", "groups": "show-logp"}
    rows[1] |= {"advantage": [0.0, -0.5]}
    lines(tmp_path / "completions.jsonl", rows)
    shown = {a["id"]: a["class"] for tag, a in report(tmp_path).tags if tag == "section" and "id" in a}
    assert shown == {"held-out": "show-logp", "groups": "show-advantage"}


def test_several_runs_in_one_report(tmp_path):
    runs = [
        write_run(tmp_path / "a", after=0.8),
        write_run(tmp_path / "b", seed=1, after=0.2, algorithm="dapo", extra=3),
    ]
    path = write_report(runs)
    assert path == tmp_path / "a" / "comparison.html"
    page = Page(path.read_text())
    assert page.visible.count("Held-out accuracy") + page.visible.count("No significant change") == 2
    settings = page.visible[page.visible.index("Settings that differ") : page.visible.index("Curves")]
    for text in ("seed 0 1", "algorithm grpo dapo", "extra - 3"):
        assert text in settings
    assert "learning_rate" not in settings
    assert all([line["name"] for line in chart["lines"]] == ["a", "b"] for chart in charts(page))
    assert re.search(r"b against a: -\d+\.\d points \(95 % interval", page.visible)
    assert "on the same 64 prompts" in page.visible
    # Other prompts under the same numbers are not the same prompts.
    file = runs[1] / "completions.jsonl"
    file.write_text(file.read_text().replace("Calculate", "Compute"))
    assert "on the same" not in Page(write_report(runs, output=tmp_path / "out.html").read_text()).visible
    with pytest.raises(InputError, match="1 to 8 runs, but found 9"):
        write_report([runs[0]] * 9)
    with pytest.raises(InputError, match=r"cannot be written to .*nowhere"):
        write_report(runs[0], output=tmp_path / "nowhere" / "out.html")


def test_text_can_be_read_in_light_and_dark():
    """WCAG's contrast of text on its grounds is at least 4.5, and that of curves on cards at least 3."""
    css = (Path(shading.__file__).parent / "report.css").read_text()
    palettes = [dict(re.findall(r"--(\w[\w-]*):(#\w+)", rule)) for rule in re.findall(r":root\{([^}]*)\}", css)]
    assert len(palettes) == 2
    for palette, curves in zip(palettes, (LIGHT, DARK), strict=True):
        for ink in ("text", "muted", "warning", "good"):
            for ground in ("page", "card", "good-page", "bad-page", "plain-page"):
                assert contrast(palette[ink], palette[ground]) >= 4.5, (ink, ground, palette["page"])
        for line in curves:
            assert contrast(line, palette["card"]) >= 3, (line, palette["card"])


def contrast(first, second):
    def luminance(colour):
        code = colour.lstrip("#")
        code = code if len(code) == 6 else "".join(2 * digit for digit in code)
        parts = [int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted((luminance(first), luminance(second)))
    return (bright + 0.05) / (dark + 0.05)


def test_everything_from_the_run_is_escaped(tmp_path):
    attack = "</pre><script>alert('x')</script>\"&"
    (tmp_path / "config.json").write_text(json.dumps({"model": attack, attack: {attack: [attack, None]}}))
    summary = {"eval_before": {"accuracy": None}, "seconds": {attack: 2.0}, attack: attack}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    lines(tmp_path / "metrics.jsonl", [{"step": 0, attack: 1.0, f"{attack}_nothing": None}])
    row = sample(tokens=[attack, "\ud800"], rewards={attack: 1}, prompt=attack, answer=attack)
    lines(tmp_path / "completions.jsonl", [row, sample(phase="eval_after", prompt=attack, tokens=[attack])])
    page = report(tmp_path)
    assert [tag for tag, _ in page.tags].count("script") == 1  # our own
    assert page.visible.count(attack) >= 10


def test_a_single_step_with_gaps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "reward/mean": 0.5, "kl": null, "entropy": NaN, "kl2": 1e300}\n'
    )
    page = report(tmp_path)
    assert page.svgs == 1
    assert "entropy, kl, kl2" in page.visible
    assert "Completions" not in page.visible


def test_a_gap_in_a_curve_stays_a_gap(tmp_path):
    rows = [{"step": i, "kl": None if i == 4 else 1.0} for i in range(9)]
    lines(tmp_path / "metrics.jsonl", rows)
    write_report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    (curve,) = re.findall(r'<path d="([^"]*)"[^>]*stroke: var\(--line0\); stroke-width: 1.4', text)
    assert curve.count("M") == 2


@pytest.mark.parametrize("steps, shaded", [(300, 0), (301, 1)])
def test_the_range_is_shaded_only_where_a_point_stands_for_several_steps(tmp_path, steps, shaded):
    """The extremes of a batch's rewards, 0 and 1 at every step, would hide the curve."""
    more = {"reward/min": 0.0, "reward/max": 1.0, "reward/std": 0.5}
    lines(tmp_path / "metrics.jsonl", ({"step": i, "reward/mean": i / 999, **more} for i in range(steps)))
    page = report(tmp_path)
    assert page.svgs == 1
    text = (tmp_path / "report.html").read_text()
    assert len(re.findall(r"opacity: 0\.16", text)) == shaded
    (chart,) = charts(page)
    assert len(chart["lines"][0]["y"]) == 300
    assert chart["lines"][0]["y"][0] == (0.0 if steps == 300 else 0.0005005)  # the mean of the first two


def charts(page):
    """What the page's script knows of each chart."""
    return [json.loads(a["data-chart"]) for _, a in page.tags if "data-chart" in a]


def test_prompts_whose_samples_differ_in_reward_come_first(tmp_path):
    rows = [sample(0, "train", prompt, k, reward=k * (prompt == 2)) for prompt in range(4) for k in range(2)]
    lines(tmp_path / "completions.jsonl", rows)
    groups = report(tmp_path).visible.partition("Training groups")[2]
    assert re.findall(r"Question (\d)\?", groups) == ["2", "0", "1", "3"]


@pytest.mark.parametrize("content", ["", "\n", '{"step": 0, "rew'])
def test_no_metrics_yet(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    (tmp_path / "completions.jsonl").write_text("")
    assert "No metrics yet" in report(tmp_path).visible


def test_a_config_alone_and_shapes_that_are_not_expected(tmp_path):
    config = {"seed": None, "model": {"path": "folder/m"}, "empty": {}, "deep": {"er": {"est": [1, 2.5, {"x": True}]}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "summary.json").write_text(
        '{"eval_after": {"accuracy": 0.5}, "seconds": {"a": null, "b": 0}, "tokens": 3}'
    )
    page = report(tmp_path)
    assert "folder/m" in page.visible
    assert "1, 2.5," in page.visible
    assert "50.0%" in page.visible
    assert "Where the time went" not in page.visible


@pytest.mark.heavy
def test_a_huge_run_stays_small_and_keeps_its_extremes(tmp_path):
    names = [f"layer/{i}" for i in range(65)]
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(10_000):
            values = {name: math.sin(step / 50) for name in names} if step % 20 == 0 else {}
            file.write(json.dumps({"step": step, "reward/mean": 100.0 * (step == 5_000), **values}) + "\n")
    tokens = [" token"] * 1_200
    values = {"advantage": [0.1] * 1_200, "logp": [-1.0] * 1_200, "entropy": [0.5] * 1_200}
    rows = (sample(s, "train", s, k, k % 2, tokens, **values) for s in range(0, 10_000, 1000) for k in range(10))
    lines(tmp_path / "completions.jsonl", rows)
    page = report(tmp_path)
    assert "100" in [text.strip() for text in page.text]  # the axis reaches the one outlier that thinning averaged away
    assert "2 more samples" in page.visible
    assert "tokens left out" in page.visible
    assert 20_000 < len(token_titles(page)) <= 25_000
    assert "layer/64" in page.visible  # named, though without a chart


def test_the_page_is_the_same_every_time(tmp_path):
    lines(tmp_path / "metrics.jsonl", [{"step": 0, "reward/mean": 1.0}, {"step": 1, "reward/mean": 2.0}])
    first = write_report(tmp_path).read_bytes()
    assert write_report(tmp_path).read_bytes() == first


def test_a_folder_without_a_run_or_with_damage_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no run in"):
        write_report(tmp_path)
    with pytest.raises(InputError, match="no run in"):
        write_report(tmp_path / "missing")
    lines(tmp_path / "completions.jsonl", [sample(logp=[-1.0])])
    with pytest.raises(InputError, match="1 values of logp for 2 tokens"):
        write_report(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json"):
        write_report(tmp_path)


LINE = sample(3, reward=0.5, advantage=[0.5, -0.5], logp=[-1.0, None], entropy=[0.0, math.nan])


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"step": "3"}, "its step is '3', but must be a whole number"),
        ({"step": 1.5}, "its step is 1.5"),
        ({"step": True}, "its step is True"),
        ({"step": 10**400}, "its step is a number of over 80 digits"),
        ({"phase": None}, "its phase is None, but must be text"),
        ({"prompt_id": "a"}, "its prompt_id is 'a', but must be a whole number, at least 0"),
        ({"prompt_id": 2**40}, "its prompt_id is"),
        ({"prompt_id": {}}, "its prompt_id is {}"),
        ({"tokens": "ab"}, "its tokens are 'ab', but must be a list of texts"),
        ({"tokens": [1, 2]}, "its tokens are [1, 2]"),
        ({"tokens": None}, "its tokens are None"),
        ({"logp": 3}, "its logp is 3, but must be a list of numbers"),
        ({"logp": ["a", "b"]}, "its logp is ['a', 'b']"),
        ({"advantage": [1.0]}, "it has 1 values of advantage for 2 tokens"),
        ({"reward": "high"}, "its reward is 'high', but must be a number or null"),
        ({"rewards": [1]}, "its rewards are [1], but must be numbers by name"),
        ({"rewards": {"correct": "yes"}}, "its rewards are {'correct': 'yes'}"),
        ({"prompt": 3}, "its prompt is 3, but must be text"),
    ],
)
def test_a_damaged_completion_is_one_line_with_its_place(tmp_path, change, reason):
    lines(tmp_path / "completions.jsonl", [LINE, LINE | change, LINE])
    for read in (write_report, logged_batch):
        with pytest.raises(InputError) as caught:
            read(tmp_path)
        assert f"completions.jsonl, line 2: {reason}" in str(caught.value)
        assert "repair or remove that line" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["step", "phase", "prompt_id", "tokens"])
def test_a_completion_that_lacks_something_is_named(tmp_path, name):
    lines(tmp_path / "completions.jsonl", [{key: value for key, value in LINE.items() if key != name}])
    for read in (write_report, logged_batch):
        with pytest.raises(InputError, match=rf"completions\.jsonl, line 1: it has no {name}"):
            read(tmp_path)


def test_a_completion_needs_no_more_than_that(tmp_path):
    lines(tmp_path / "completions.jsonl", [{"step": 0, "phase": "train", "prompt_id": 0, "tokens": ["a"]}])
    assert "Step 0" in report(tmp_path).visible


@pytest.mark.parametrize("step", ["3", 1.5, True, None, -1, 10**400])
def test_a_step_of_the_metrics_that_is_none_is_said(tmp_path, step):
    lines(tmp_path / "metrics.jsonl", [{"step": 0, "kl": 1.0}, {"step": step, "kl": 1.0}])
    with pytest.raises(InputError, match=r"metrics\.jsonl: a step is .*, but must be a whole number"):
        write_report(tmp_path)


def test_notes_and_odd_values_among_the_metrics_are_no_curves(tmp_path):
    odd = {"text": "a", "list": [1], "huge": 10**400, "flag": True, "deep": {"a": 1}}
    lines(tmp_path / "metrics.jsonl", [{"note": "no step"}, {"step": 0, "kl": 1.0, **odd}])
    page = report(tmp_path)
    assert "KL to the reference" in page.visible
    assert "huge" in page.visible


@pytest.mark.parametrize(
    "summary",
    [
        {"eval_after": {"accuracy": 10**400}},
        {"eval_before": {"accuracy": 0.5, "low": 1e308, "high": 10**400}},
    ],
)
def test_a_summary_that_no_report_can_show_is_one_line(tmp_path, summary):
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(InputError, match=r"summary\.json holds a value that no report can show: "):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_deep_and_huge_values_of_a_configuration_are_shown(tmp_path):
    deep = {"a": 1}
    for _ in range(60):
        deep = {"a": deep}
    (tmp_path / "config.json").write_text(json.dumps({"deep": deep, "huge": 10**400, "more": 1e308}))
    assert "a number of over 80 digits" in report(tmp_path).visible


def test_rewards_that_differ_by_rounding_have_a_distribution(tmp_path):
    rows = [sample(step, reward=0.1 + step * 1e-17 + (step % 2) * 2e-17) for step in range(8)]
    rows += [sample(9, reward=0.30000000000000004), sample(10, reward=0.3)]
    for some in (rows, rows[:8], rows[8:]):
        lines(tmp_path / "completions.jsonl", some)
        assert "Rewards" in report(tmp_path).visible


@pytest.mark.parametrize("module", ["jinja2", "matplotlib"])
def test_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch, module):
    lines(tmp_path / "metrics.jsonl", [{"step": 0, "reward/mean": 1.0}])
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=r"jaxrl_llm\[run\]"):
        write_report(tmp_path)


def tokens_of(text):
    return re.findall(r'<i class="([^"]*)" title="([^"]*)">(.*?)</i>', text, flags=re.S)


def test_small_advantages_have_a_shade():
    """Seven of eight samples right: each has an advantage of 0.38 beside the -2.65 of the other."""
    text = shade(["a", "b", "c", "d"], [0.38, -2.65, 0.001, 0.0], "advantage", limit=2.65)
    assert [classes for classes, _, _ in tokens_of(text)] == ["a2", "a-6", "a1", ""]


def test_shade_levels_run_from_one_end_of_the_range_to_the_other():
    text = shade(["a", "b", "c", "d", "e", "f"], [2.0, 1.0, 0.0, -1.0, -8.0, None], "advantage", limit=2.0)
    assert [classes for classes, _, _ in tokens_of(text)] == ["a6", "a4", "", "a-4", "a-6", ""]
    assert tokens_of(text)[4][1] == "advantage -8.000"
    assert tokens_of(text)[5][1] == ""
    # The deepest red is for the lowest, the deepest blue for the highest.
    assert ".show-advantage .a-6{background:rgba(214,64,52,0.6)}" in text
    assert ".show-advantage .a6{background:rgba(38,110,214,0.6)}" in text
    assert 'class="jaxrl-tokens show-advantage"' in text


def test_shade_without_a_limit_takes_it_from_the_values():
    (first, _, _), (second, _, _) = tokens_of(shade(["x", "y"], [-3.0, -1.5], "logp"))
    assert (first, second) == ("l-6", "l-3")
    assert tokens_of(shade(["x"], [0.0], "entropy"))[0][0] == ""
    assert tokens_of(shade(["x"], [math.nan], "entropy"))[0][:2] == ("", "")
    assert shade([], [], "logp").startswith("<div")


@pytest.mark.parametrize(
    "token, shown",
    [
        ("\n", "↵\n"),
        ("a\n\n b", "a↵\n↵\n b"),
        ("\t", "⇥\t"),
        ("\r\x00", "␍␀"),
        ("\u00a0", "⍽"),
        ("\u202egnp", "⟨U+202E⟩gnp"),
        ("\u200b", "⟨U+200B⟩"),
        ("\x7f", "⟨U+007F⟩"),
        ("", "∅"),
        ("<b>&", "<b>&"),
        ("é ü 漢 👩\u200d🚀", "é ü 漢 👩\u200d🚀"),
    ],
)
def test_invisible_characters_become_visible(token, shown):
    ((_, _, body),) = tokens_of(shade([token], [1.0], "entropy"))
    assert html.unescape(body) == shown
    assert "<" not in body


def test_shade_refuses_what_does_not_fit():
    with pytest.raises(InputError, match="did you mean 'entropy'"):
        shade(["a"], [1.0], "entropie")
    with pytest.raises(InputError, match="2 values of logp for 1 tokens"):
        shade(["a"], [1.0, 2.0], "logp")
    with pytest.raises(InputError, match=r"limit.* 0"):
        shade(["a"], [1.0], "logp", limit=0)
