/* Curves by step, over uPlot: smoothing, one cursor for all charts of a page, and the numbers beside it. */

import { h, replace } from "../lib/dom.js";
import { axisLabels, number, percent as asPercent } from "../lib/format.js";
import { colour } from "../lib/theme.js";

const HEIGHT = 200;
const RAW_ALPHA = 0.28;
const WHOLE = [1, 2, 5].flatMap((n) => [...Array(10).keys()].map((power) => n * 10 ** power)).sort((a, b) => a - b);
const SERIES = 6; // colours in the stylesheet; further series begin again with the first

/** Exponential moving average without the bias of its first values; gaps stay gaps. */
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

export class Chart {
  /** `signal` ends the chart's listeners with the page. */
  constructor({ title, percent = false, signal }) {
    this.title = title;
    this.format = percent ? (value) => asPercent(value, 1) : number;
    this.percent = percent;
    this.weight = 0;
    this.tip = h("div.chart-tip", { hidden: true });
    this.area = h("div.chart", { role: "img" }, this.tip);
    this.legend = h("div.legend");
    this.element = h("div", this.area, this.legend);
    const resize = new ResizeObserver(() => this.plot?.setSize({ width: this.area.clientWidth, height: HEIGHT }));
    resize.observe(this.area);
    addEventListener("themechange", () => this.#build(), { signal });
    signal?.addEventListener("abort", () => resize.disconnect());
  }

  /** x: numbers; series: [{label, values, dashed?}]. */
  draw(x, series) {
    const sameShape = this.series?.map((s) => s.label).join() === series.map((s) => s.label).join();
    this.x = x;
    this.series = series;
    this.area.setAttribute("aria-label", this.#summary());
    if (sameShape && this.plot) this.plot.setData(this.#data());
    else this.#build();
  }

  smooth(weight) {
    this.weight = weight;
    this.plot?.setData(this.#data());
  }

  #data() {
    const fine = this.series.map((s) => smoothed(s.values, this.weight));
    const raw = this.weight ? this.series.map((s) => s.values) : this.series.map((s) => s.values.map(() => null));
    return [this.x, ...raw, ...fine];
  }

  #build() {
    if (!this.series) return;
    this.plot?.destroy();
    if (!this.area.isConnected && !this.area.clientWidth) {
      requestAnimationFrame(() => this.area.isConnected && this.#build()); // drawn before the page was shown
      return;
    }
    const strokes = this.series.map((_, i) => colour(`series-${(i % SERIES) + 1}`));
    const line = (i, width, alpha) => ({
      stroke: strokes[i],
      width,
      alpha,
      spanGaps: true,
      dash: this.series[i].dashed ? [6, 4] : undefined,
      points: { show: () => this.x.length === 1 },
    });
    const axis = {
      stroke: colour("soft"),
      grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui",
    };
    const options = {
      width: this.area.clientWidth || 320,
      height: HEIGHT,
      scales: { x: { time: false }, y: { range: (_, low, high) => this.#range(low, high) } },
      axes: [
        { ...axis, space: 70, size: 28, incrs: WHOLE },
        {
          ...axis,
          size: 52,
          space: 36,
          values: (_, ticks) => axisLabels(ticks, this.percent),
        },
      ],
      series: [{}, ...this.series.map((_, i) => line(i, 1, RAW_ALPHA)), ...this.series.map((_, i) => line(i, 2, 1))],
      legend: { show: false },
      cursor: { sync: { key: "palestra-step" }, y: false, points: { size: 7 }, drag: { x: true, y: false } },
      hooks: { setCursor: [(plot) => this.#showTip(plot)] },
    };
    this.plot = new window.uPlot(options, this.#data(), this.area);
    replace(
      this.legend,
      this.series.length > 1
        ? this.series.map((s, i) => h("span", h("i", { style: { background: strokes[i] } }), s.label))
        : null,
    );
  }

  #range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.percent) return [Math.min(0, low), Math.max(1, high)];
    const size = Math.max(Math.abs(low), Math.abs(high));
    const isFlat = high - low < 0.02 * size; // a finer scale would have the same label at each tick
    const pad = (isFlat ? 0.05 * size : 0.08 * (high - low)) || 1;
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  }

  #showTip(plot) {
    const { idx, left, top } = plot.cursor;
    const isHere = idx !== null && idx !== undefined && left >= 0 && plot.root.matches(":hover");
    this.tip.hidden = !isHere;
    if (!isHere) return;
    const rows = this.series.map((s) => h("div", `${s.label} `, h("b", this.format(s.values[idx]))));
    replace(this.tip, h("div.soft", `step ${number(this.x[idx])}`), rows);
    const overLeft = left > plot.bbox.width / devicePixelRatio / 2;
    this.tip.style.left = `${left + (overLeft ? 40 - this.tip.offsetWidth : 68)}px`;
    this.tip.style.top = `${Math.max(0, top - 10)}px`;
  }

  #summary() {
    const ends = this.series.map((s) => {
      const values = s.values.filter((value) => value !== null && value !== undefined);
      return values.length
        ? `${s.label} from ${this.format(values[0])} to ${this.format(values.at(-1))}`
        : `${s.label}: no values`;
    });
    return `${this.title} by step: ${ends.join("; ")}`;
  }
}
