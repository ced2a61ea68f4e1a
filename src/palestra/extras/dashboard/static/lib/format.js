/* Numbers, times and sizes for people. Everything returns a string; what is unknown is "–". */

export const NONE = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Three significant digits, thousands with separators: 0.0312, 1.25, 12,400. */
export function number(value) {
  if (!known(value)) return value === undefined || value === null ? NONE : String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/** Every digit of a float32, as in the run's files. */
export const exact = (value) => (known(value) ? String(Number(value.toPrecision(9))) : NONE);

export const integer = (value) => (known(value) ? Math.round(value).toLocaleString("en") : NONE);

export const percent = (share, digits = 0) => (known(share) ? `${(100 * share).toFixed(digits)} %` : NONE);

/** Labels of an axis in one notation: small numbers, such as learning rates, would be cut off by its edge. */
export function axisLabels(ticks, inPercent = false) {
  if (inPercent) return ticks.map((tick) => percent(tick));
  const size = Math.max(...ticks.map(Math.abs));
  return ticks.map((tick) => (size && size < 0.01 && tick ? tick.toExponential(2) : number(tick)));
}

export const signed = (value) => (known(value) ? (value > 0 ? "+" : "") + number(value).replace("-", "−") : NONE);

export function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 5940) return `${Math.round(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function bytes(count) {
  if (!known(count)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(count, 1)) / 3));
  const value = count / 1000 ** power;
  return `${value < 9.95 && power ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
}

/** A moment (seconds since 1970) relative to now: "5 min ago". */
export function ago(seconds) {
  if (!known(seconds)) return NONE;
  const passed = Date.now() / 1000 - seconds;
  if (passed < 60) return "just now";
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  if (passed < 60 * 86400) return `${Math.round(passed / 86400)} days ago`;
  return new Date(seconds * 1000).toLocaleDateString("en", { year: "numeric", month: "short", day: "numeric" });
}

export const moment = (seconds) =>
  known(seconds) ? new Date(seconds * 1000).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" }) : NONE;

/** When a rollout was sampled: in a step of training, or in an evaluation. */
export function when(kind, step) {
  const name = kind === "train" ? `step ${step}` : kindName(kind);
  return name[0].toUpperCase() + name.slice(1);
}

/** Rollouts of one kind: those of training, or of one evaluation. */
export const kindName = (kind) =>
  ({ train: "training", before: "before training", after: "after training" })[kind] ?? `evaluation at step ${kind}`;

/** The kind as a parameter of an address; training is what is meant without one. */
export const kindQuery = (kind) => (kind === "train" ? null : kind);

/** The value of a setting as people type it. */
export const settingText = (value) =>
  value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);

/** The class of a number that is good above 0 and bad below. */
export const signKind = (value) => (value > 0 ? "good" : value < 0 ? "bad" : "soft");

/** "1 rollout", "2 rollouts". */
export const plural = (count, noun) => `${integer(count)} ${noun}${count === 1 ? "" : "s"}`;

/** Environments → [family, members] pairs in their order; those without a family come one by one, as [null, [one]]. */
export function byFamily(environments) {
  const found = new Map();
  for (const each of environments) {
    const key = each.family ?? each;
    if (!found.has(key)) found.set(key, [each.family ?? null, []]);
    found.get(key)[1].push(each);
  }
  return [...found.values()];
}

/** Rows → lists of neighbours that belong to one group. */
export function neighbours(rows) {
  const found = [];
  for (const row of rows) {
    if (found.length && found.at(-1)[0].group === row.group && found.at(-1)[0].kind === row.kind) found.at(-1).push(row);
    else found.push([row]);
  }
  return found;
}

/** How many of `count` equally wide columns are not, or only partly, in view to the right. */
export const columnsBeyond = (count, { scrollWidth, clientWidth, scrollLeft }) =>
  Math.max(0, Math.ceil((scrollWidth - clientWidth - scrollLeft - 1) / (scrollWidth / count) - 0.05));

/** A run's pass rate for the list, and whether it is that of held-out or of training problems; empty where there is none. */
export function passRate(run) {
  if (known(run.eval_pass_rate)) return [percent(run.eval_pass_rate), "held out"];
  return known(run.pass_rate) ? [percent(run.pass_rate), "training"] : ["", ""];
}

/** How many rollouts a step took, and why they were more than the settings say. */
export function rolloutsOfStep({ planned, mean }) {
  if (mean <= planned) return integer(planned);
  const why = "groups with equal rewards teach nothing, so other problems are sampled, too (train.signal_share)";
  return `${integer(mean)} on average, ${integer(planned)} by the settings: ${why}`;
}

/** What can be said without findings: nothing about learning where the run failed, or has taken no steps. */
export function noFindings(run) {
  if (run.state === "failed")
    return `The run failed ${run.step ? "later: its steps up to then show no other problem" : "before its first step"}.`;
  if (!run.step) return run.active ? "Findings appear after the first steps." : "The run took no steps.";
  return run.active ? "No problems found so far." : "No problems found in its steps.";
}
