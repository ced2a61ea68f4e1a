/* A run that was never opened is read into its index, with each request a little more: how far that has come. */

import { get, runPath } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { percent } from "../lib/format.js";

/** A line that says so until all is read; `onMore` is called with the run's facets whenever more is. */
export function reading(run, indexed, onMore, signal) {
  const line = h("p.soft.small.bar", { role: "status" });
  const draw = (share) => {
    line.hidden = share >= 1;
    line.textContent = `Reading the rollouts for the first time, oldest first: ${percent(share)}; newer ones follow.`;
  };
  const readOn = async (share) => {
    while (share < 1) {
      await new Promise((resolve) => setTimeout(resolve, 500));
      const facets = await get(runPath(run, "facets"), {}, signal);
      share = facets.indexed;
      await onMore(facets);
      draw(share);
    }
  };
  draw(indexed);
  readOn(indexed).catch(() => {}); // the user has left
  return line;
}
