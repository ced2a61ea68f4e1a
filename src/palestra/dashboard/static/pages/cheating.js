/* Is it cheating? Check metrics against the rewarded measures, successes by their shape, and where to look first. */

import { Chart } from "../components/chart.js";
import { moreButton, notice, stats } from "../components/parts.js";
import { reading } from "../components/reading.js";
import { rolloutLink, rolloutTable } from "../components/rollout_table.js";
import { getRun, runHead } from "../components/run_head.js";
import { sparkline } from "../components/sparkline.js";
import { get, runPath } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { integer, percent } from "../lib/format.js";
import { link } from "../lib/router.js";
import { oneLine } from "../lib/text.js";

const FIRST = 20; // suspects; the others behind a button

export async function show({ names: [id], signal }) {
  const load = () => get(runPath(id, "suspicion"), {}, signal);
  const [run, data] = await Promise.all([getRun(id, signal), load()]);
  const body = h("div.stack", parts(id, data, signal));
  const redraw = async () => replace(body, parts(id, await load(), signal));
  return [runHead(run, "cheating"), reading(id, data.indexed, redraw, signal), body];
}

const parts = (id, data, signal) => [
  data.alarms.map(alarm),
  data.alarms.length ? null : noAlarm(data),
  (data.notes ?? []).map((note) => notice("", note)),
  curves(data, signal),
  clusters(id, data),
  suspects(id, data),
];

const alarm = ({ sentence }) =>
  h(
    "div",
    { role: "alert" },
    notice("bad", h("b", "Reward hacking? "), sentence[0].toUpperCase(), sentence.slice(1), "."),
  );

const noAlarm = (data) =>
  Object.keys(data.witnesses).length ? notice("good", "No alarm: where the reward rose, no check metric fell.") : null;

function curves(data, signal) {
  const chart = new Chart({ title: "Rewarded measures and check metrics", signal });
  const lines = (found, dashed) =>
    Object.entries(found).map(([label, values]) => ({ label: dashed ? `${label} (check metric)` : label, values, dashed }));
  chart.draw(data.step, [
    ...(Object.keys(data.rewarded).length === 1 ? [] : [{ label: "reward", values: data.reward }]), // it would be the same
    ...lines(data.rewarded, false),
    ...lines(data.witnesses, true),
  ]);
  return h("section.card", h("h2", "Rewarded measures, and check metrics (dashed)"), chart.element);
}

function clusters(id, data) {
  const cards = data.clusters.map((cluster) =>
    h(
      "article.card",
      h(
        "div.card-head",
        h("h3.break", oneLine(cluster.shape, 140)),
        sparkline(cluster.share, "share of the successes"),
      ),
      stats([
        ["successes", integer(cluster.count)],
        ["growth", percent(cluster.growth).replace("-", "−")],
        ["since step", String(cluster.first_step)],
        ...(cluster.witness_rate === null || cluster.witness_rate === undefined
          ? []
          : [["check metric passes", percent(cluster.witness_rate)]]),
      ]),
      cluster.phrase ? h("p.small.below", "All say ", h("mark", oneLine(cluster.phrase, 120))) : null,
      h(
        "p.small.below",
        cluster.earliest
          ? [h("a", { href: rolloutLink(id, cluster.earliest) }, `The first, in step ${cluster.earliest.step}`), " · "]
          : null,
        h("a", { href: link(["runs", id, "rollouts"], { shape: cluster.shape }) }, "all of them"),
      ),
    ),
  );
  return h(
    "section",
    h("h2.bar", "Successes by shape, those that grow fastest first"),
    cards.length ? h("div.grid", cards) : h("p.soft", "No successes yet."),
  );
}

function suspects(id, data) {
  const title = h("h2.bar", "Look at these first");
  if (!data.suspects.length) return h("section", title, h("p.soft", "No success looks suspicious."));
  const rows = data.suspects.map((suspect) => ({ ...suspect.rollout, why: suspect.why, score: suspect.score }));
  const why = {
    label: "Why",
    cell: (row) =>
      h(
        "ul.small.why",
        row.why.map((reason) => h("li", oneLine(reason, 200))),
      ),
  };
  const card = h("div.card.flush");
  const draw = (count) =>
    replace(
      card,
      rolloutTable(id, rows.slice(0, count), { label: "Suspects", extra: [why], brief: true }),
      moreButton(rows.length > count && rows.length, draw),
    );
  draw(FIRST);
  return h("section", title, card);
}
