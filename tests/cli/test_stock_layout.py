"""Stock verl's layout beside a plan."""

from tests.cli.test_plan import PLAN_PACKER, SHAPE, plan_of, refused, run
from tests.support.written_pages import parsed


def test_verls_own_layout_stands_beside_the_plan(path, rows, tmp_path):
    shape = ("--dp", 2, "--mini-batch", 3, "--n", 2, "--budget", 1000, "--compare", *PLAN_PACKER)
    verl, plan = plan_of(path, *shape)["comparison"].values()
    padded = -(-len(rows) // 6) * 6  # lcm(dp 2, 3 prompts x 2)
    assert (verl["optimizer_steps"], plan["optimizer_steps"]) == (padded // 6, 3)
    assert (verl["pads"], verl["pad_tokens"]) == (padded - len(rows), 128 * (padded - len(rows)))
    assert verl["tokens"] == plan["tokens"] == sum(row["tokens"] for row in rows)
    assert verl["over_perfect"] >= plan["over_perfect"] >= 1
    shown = run("--page", page := tmp_path / "plan.html", path, *shape)
    assert f" {verl['over_perfect']:.3f} │" in shown.stdout
    charts = parsed(page).packed["step-1"]["charts"]
    for name in ("actor", "verl", "plan"):
        assert sorted(row for bar in charts[name]["bars"] for row in bar[6]) == [*range(len(rows))]


def test_what_stock_verl_stops_at_is_refused_and_not_compared(path):
    assert "cannot split the 6 rows of a mini-batch" in refused(path, *SHAPE, "--compare")
    path.write_text('{"prompt": "a", "session": 0, "tokens": 5}\n')
    assert "a pad of stock verl has 128 tokens" in refused(
        path, *SHAPE, "--dp", 2, "--budget", 127, "--compare"
    )
    assert run(path, *SHAPE, "--dp", 2, "--budget", 128, "--compare").exit_code == 0
