/* How a column of numbers becomes colours. A scale is {style(value) → CSS colour or "", ends: [low, high] labels, css}. */

import { number } from "../lib/format.js";

const mix = (name, share) => `color-mix(in srgb, var(--${name}) ${Math.round(100 * share)}%, transparent)`;
const MOST = 0.62; // of the colour: the text stays readable on it

export const MAKER_COLOURS = {
  model: mix("series-1", 0.3),
  environment: mix("series-2", 0.18),
  template: mix("soft", 0.16),
};
export const MASK_COLOURS = { true: mix("series-3", 0.34), false: mix("soft", 0.12) };

export const COLUMNS = {
  maker: { label: "Maker", help: "who wrote the token: the model, the environment (tools), or the chat template" },
  mask: { label: "Mask", help: "whether the token counts in the policy loss" },
  logprob: {
    label: "Logprob",
    help: "the sampler's logprob: the redder, the more surprising",
    worst: "Least likely token",
  },
  advantage: { label: "Advantage", help: "green: made more likely; red: made less likely" },
  ratio: {
    label: "Ratio",
    help: "learner's over sampler's probability; 1 is on-policy",
    worst: "Ratio furthest from 1",
  },
  entropy: { label: "Entropy", help: "how open the choice was, in nats", worst: "Highest entropy" },
  gap: { label: "Sampler gap", help: "sampler's minus learner's logprob: should be near 0", worst: "Largest gap" },
};

/** The scale of a numeric column, given the lowest and the highest value of the rollout. */
export function scaleOf(column, [low, high]) {
  switch (column) {
    case "logprob": // 0 is certain; the floor keeps one wild token from paling all others
      return sequential("bad", 0, Math.min(-1, Math.max(low, -8)));
    case "entropy":
      return sequential("series-4", 0, Math.max(0.5, high));
    case "ratio":
      return diverging(
        "series-2",
        "bad",
        (value) => Math.log(value),
        Math.max(Math.abs(Math.log(low)), Math.abs(Math.log(high)), 1e-3),
        "1",
      );
    case "gap":
      return diverging("series-2", "bad", (value) => value, Math.max(Math.abs(low), Math.abs(high), 1e-6), "0");
    default:
      return diverging("bad", "good", (value) => value, Math.max(Math.abs(low), Math.abs(high), 1e-6), "0");
  }
}

function sequential(name, from, to) {
  const share = (value) => Math.max(0, Math.min(1, (value - from) / (to - from)));
  return {
    style: (value) => (value === null ? "" : mix(name, MOST * share(value))),
    ends: [number(from), number(to)],
    css: `linear-gradient(90deg, ${mix(name, 0.04)}, ${mix(name, MOST)})`,
  };
}

function diverging(below, above, place, limit, middle) {
  const style = (value) => {
    if (value === null) return "";
    const share = Math.max(-1, Math.min(1, place(value) / limit));
    return mix(share < 0 ? below : above, MOST * Math.abs(share));
  };
  const end = middle === "1" ? [Math.exp(-limit), Math.exp(limit)] : [-limit, limit];
  return {
    style,
    ends: end.map(number),
    css: `linear-gradient(90deg, ${mix(below, MOST)}, transparent, ${mix(above, MOST)})`,
  };
}
