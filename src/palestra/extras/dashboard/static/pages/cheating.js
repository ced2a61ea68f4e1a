/* Is it cheating? Check metrics against the rewarded measures, and alarms where they part. */

import { Chart } from "../components/chart.js";
import { notice } from "../components/parts.js";
import { getRun, runHead } from "../components/run_head.js";
import { get, runPath } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { link } from "../lib/router.js";

export async function show({ names: [id], signal }) {
  const [run, data] = await Promise.all([getRun(id, signal), get(runPath(id, "suspicion"), {}, signal)]);
  return [
    runHead(run, "cheating"),
    h(
      "div.stack",
      data.alarms.map((found) => alarm(id, found)),
      data.alarms.length ? null : noAlarm(data),
      data.notes.map((note) => notice("", note)),
      curves(data, signal),
    ),
  ];
}

const alarm = (id, { sentence }) =>
  h(
    "div",
    { role: "alert" },
    notice(
      "bad",
      h("b", "Reward hacking? "),
      sentence[0].toUpperCase(),
      sentence.slice(1),
      ". ",
      h("a.underlined", { href: link(["runs", id, "rollouts"], { passed: 1, sort: "newest" }) }, "Newest rollouts that passed"),
    ),
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
