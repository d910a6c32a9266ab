"""Stock verl's layout beside a plan."""

from tests.cli.test_plan import PLAN_PACKER, SHAPE, plan_of, refused, run


def test_verls_own_layout_stands_beside_the_plan(path, rows, tmp_path):
    shape = ("--dp", 2, "--mini-batch", 3, "--n", 2, "--budget", 1000, "--compare", *PLAN_PACKER)
    verl, plan = plan_of(path, *shape)["comparison"].values()
    padded = -(-len(rows) // 6) * 6  # lcm(dp 2, 3 prompts x 2)
    assert (verl["optimizer_steps"], plan["optimizer_steps"]) == (padded // 6, 3)
    assert verl["pads"] == padded - len(rows)
    assert verl["computed_tokens"] == plan["computed_tokens"] == sum(row["tokens"] for row in rows)
    assert verl["over_perfect"] >= plan["over_perfect"] >= 1
    assert f" {verl['over_perfect']:.3f}" in run(path, *shape).stdout


def test_what_stock_verl_stops_at_is_refused_and_not_compared(path):
    assert "do not divide the 6 rows of a mini-batch" in refused(path, *SHAPE, "--compare")
    path.write_text('{"prompt": "a", "session": 0, "tokens": 5}\n')
    assert "128" in refused(path, *SHAPE, "--dp", 2, "--budget", 127, "--compare")
    assert run(path, *SHAPE, "--dp", 2, "--budget", 128, "--compare").exit_code == 0
