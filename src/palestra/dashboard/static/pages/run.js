/* A run: how it goes, live, and what to change. */

import { Chart } from "../components/chart.js";
import { facts, notice, progress, stats } from "../components/parts.js";
import { getRun, runHead } from "../components/run_head.js";
import { follow, get, runPath } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { duration, integer, moment, noFindings, number, percent, rolloutsOfStep } from "../lib/format.js";
import { link } from "../lib/router.js";
import { breakable } from "../lib/text.js";

const SMOOTHING = "palestra-smoothing";

export async function show({ names: [id], signal }) {
  const [run, metrics] = await Promise.all([getRun(id, signal), get(runPath(id, "metrics"), {}, signal)]);
  const head = h("div", runHead(run, ""));
  const summary = h("div.card", summaryOf(run));
  const advice = h("section.card", adviceOf(run.findings, run));
  const curves = new Curves(metrics, signal);
  const count = (known) => (known === null || known === undefined ? "open the list" : integer(known)); // null: not indexed yet
  const rollouts = h("a", { href: link(["runs", id, "rollouts"]) }, count(run.rollouts));

  const update = (fresh) => {
    const isNew = fresh.state !== run.state;
    Object.assign(run, fresh);
    replace(summary, summaryOf(run));
    if (isNew) replace(head, runHead(run, ""));
  };
  const events = follow(
    runPath(id, "events"),
    {
      run: update,
      metrics: (data) => curves.add(data, () => get(runPath(id, "metrics"), {}, signal)),
      findings: (data) => replace(advice, adviceOf(data.findings, run)),
      rollouts: (data) => (rollouts.textContent = count(data.count)),
      end: () => events.close(),
    },
    signal,
  );

  const side = h(
    "aside.stack",
    advice,
    h(
      "section.card",
      h("h2", "About"),
      facts([
        ["Rollouts", rollouts],
        ...(run.sampling ? [["Rollouts a step", rolloutsOfStep(run.sampling)]] : []),
        ...(run.capability ? [["Before training", run.capability.text]] : []),
        ["Started", moment(run.started ?? run.created)],
        ["Folder", h("span.mono.small", breakable(run.folder))],
        ...(run.measures ?? []).map((m) => [m.name, m.rewarded ? `weight ${number(m.weight)}` : "check metric"]),
      ]),
    ),
  );
  return [head, h("div.columns", h("div.stack", summary, curves.element), side)];
}

function summaryOf(run) {
  const before = run.report?.before?.pass_rate?.rate;
  const after = run.report?.after?.pass_rate?.rate;
  return [
    stats([
      ["step", run.total_steps ? `${run.step} / ${run.total_steps}` : String(run.step ?? 0)],
      ["mean reward, training", number(run.reward_mean)],
      ["pass rate, training", percent(run.pass_rate)],
      ...(after === undefined || before === undefined
        ? []
        : [["held-out, before → after", `${percent(before)} → ${percent(after)}`]]),
      ...(run.seconds === null ? [] : [[run.active ? "so far" : "took", duration(run.seconds)]]),
      ...(run.active && run.seconds_left ? [["left", duration(run.seconds_left)]] : []),
    ]),
    run.active && run.total_steps ? h("div.below", progress((run.step ?? 0) / run.total_steps, "Progress")) : null,
  ];
}

function adviceOf(findings, run) {
  const list = findings.map((finding) =>
    h(
      "li",
      notice(
        "warn",
        h("p", finding.sentence),
        exampleOf(finding.example, run),
        finding.settings?.length
          ? h(
              "p.small.soft",
              "Look at ",
              finding.settings.map((name, i) => [i ? ", " : "", h("code", name)]),
            )
          : null,
      ),
    ),
  );
  return [h("h2", "Advice"), list.length ? h("ul.advice", list) : h("p.soft", noFindings(run))];
}

/** The rollout that shows what a finding says. */
function exampleOf(example, run) {
  if (!example) return null;
  const parts = ["runs", run.id, "rollouts"];
  const target = example.id
    ? link([...parts, String(example.id)])
    : link(parts, { kind: example.source, step: example.source === "train" ? example.step : undefined });
  const name = example.source ? h("a", { href: target }, "Example") : "Example";
  return h("p.small", name, example.text ? [": ", h("span.mono", example.text)] : null);
}

/* All charts of a run. New rows arrive while it trains; a series that was not there before draws the charts anew. */
class Curves {
  constructor(metrics, signal) {
    this.signal = signal;
    this.weight = Number(localStorage.getItem(SMOOTHING) ?? 0.6);
    const slider = h("input", {
      type: "range",
      min: 0,
      max: 0.95,
      step: 0.05,
      value: this.weight,
      oninput: () => this.#smooth(Number(slider.value)),
    });
    this.grid = h("div.grid");
    this.element = h(
      "section",
      { "aria-label": "Curves" },
      h("div.row.between.bar", h("h2", "Curves"), h("label.small.soft", "Smoothing", slider)),
      this.grid,
    );
    this.#build(metrics);
  }

  add(data, reload) {
    if (!data.step.length) return;
    const isKnown = Object.keys(data.series).every((name) => name in this.metrics.series);
    if (!isKnown) return reload().then((metrics) => !this.signal.aborted && this.#build(metrics));
    const { step, series } = this.metrics;
    const from = step.findIndex((value) => value >= data.step[0]); // each stream begins with all rows
    const keep = from < 0 ? step.length : from;
    step.length = keep;
    step.push(...data.step);
    for (const [name, values] of Object.entries(series)) {
      values.length = keep;
      values.push(...(data.series[name] ?? data.step.map(() => null)));
    }
    this.#draw();
  }

  #build(metrics) {
    this.metrics = metrics;
    this.charts = metrics.charts.map(({ title, names, unit }) => {
      const chart = new Chart({
        title,
        percent: unit === "%",
        signal: this.signal,
      });
      chart.weight = this.weight;
      return { chart, names, title, unit };
    });
    replace(
      this.grid,
      this.charts.map(({ chart, title, unit }) =>
        h(
          "section.card",
          h("div.card-head", h("h2", title), unit && unit !== "%" ? h("span.soft.small", unit) : null),
          chart.element,
        ),
      ),
    );
    if (!this.charts.length) replace(this.grid, h("p.soft", "The curves begin with the first step."));
    this.#draw();
  }

  #draw() {
    const { step, series } = this.metrics;
    for (const { chart, names } of this.charts) {
      const used = names.filter((name) => series[name]);
      chart.draw(
        step,
        used.map((name) => ({ label: shortName(name, used), values: series[name] })),
      );
    }
  }

  #smooth(weight) {
    this.weight = weight;
    localStorage.setItem(SMOOTHING, weight);
    this.charts.forEach(({ chart }) => chart.smooth(weight));
  }
}

/** "score/a" and "score/b" under one title are a and b. */
function shortName(name, all) {
  const prefix = name.slice(0, name.indexOf("/") + 1);
  return prefix && all.every((other) => other.startsWith(prefix)) ? name.slice(prefix.length) : name;
}
