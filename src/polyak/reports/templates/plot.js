"use strict";
// One chart, drawn by Bokeh: lines with intervals, a legend of buttons, zoom by dragging, and values by pointer or arrow keys.
const OTHERS = "other runs";

class Plot {
  constructor(figure) {
    this.figure = figure;
    this.box = figure.querySelector(".plot");
    this.reading = document.createElement("p");
    this.reading.className = "reading";
    this.legend = document.createElement("ul");
    this.legend.className = "legend";
    figure.append(this.reading, this.legend);
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "slider");
    this.box.addEventListener("pointermove", (event) => this.readAtPointer(event));
    this.box.addEventListener("pointerleave", () => this.read(null));
    this.box.addEventListener("dblclick", () => this.fit());
    this.box.addEventListener("keydown", (event) => this.press(event));
    this.signature = "";
    this.position = null;
  }

  // Draw the lines of an axis; a chart of the same lines and colors as before only gets the new values.
  show(chart, axis, hidden) {
    this.chart = chart;
    this.axis = axis;
    const all = chart.lines[axis];
    this.lines = all.filter((line) => !hidden.has(line.color === null ? OTHERS : line.name));
    const last = this.lines.reduce((most, line) => Math.max(most, line.x.at(-1) ?? 0), 0);
    [this.unit, this.unitName] = Plot.unitOf(chart, axis, last);
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const signature = JSON.stringify([axis, dark, this.unitName, this.lines.map((line) => [line.name, line.color, !!line.low])]);
    if (signature === this.signature) this.sources.forEach((source, i) => { source.data = this.parts[i][1](); });
    else this.build(signature);
    this.drawLegend(all, hidden);
    this.describe();
  }

  static unitOf(chart, axis, last) {
    if (chart.xLabel) return [1, chart.xLabel];
    if (axis === "steps") return [1, chart.unit];
    return last > 7200 ? [3600, "hours"] : last > 120 ? [60, "minutes"] : [1, "seconds"];
  }

  build(signature) {
    this.signature = signature;
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const font = { text_font: "system-ui, sans-serif" };
    this.view?.remove?.();
    this.box.replaceChildren();
    const plot = Bokeh.Plotting.figure({
      tools: [], toolbar_location: null, sizing_mode: "stretch_both", min_border: 4, outline_line_color: null,
      background_fill_color: null, border_fill_color: null,
      ...(this.chart.yRange ? { y_range: new Bokeh.Range1d({ start: this.chart.yRange[0], end: this.chart.yRange[1] }) } : {}),
    });
    const zoom = new Bokeh.BoxZoomTool({ dimensions: "width" });
    plot.add_tools(zoom);
    plot.toolbar.active_drag = zoom;
    for (const axis of [plot.xaxis, plot.yaxis].flat()) {
      Object.assign(axis, {
        axis_line_color: color("rule"), major_tick_line_color: null, minor_tick_line_color: null, axis_label_text_font_style: "normal",
        major_label_text_color: color("faint"), axis_label_text_color: color("faint"), major_label_text_font_size: "12px",
        axis_label_text_font_size: "12px", major_label_text_font: font.text_font, axis_label_text_font: font.text_font,
      });
    }
    for (const grid of [plot.xgrid, plot.ygrid].flat()) grid.grid_line_color = color("grid");
    plot.xgrid.grid_line_color = null;
    plot.xaxis.axis_label = this.unitName;
    if (this.unitName === this.chart.unit) plot.xaxis.formatter = new Bokeh.NumeralTickFormatter({ format: "0.[0]a" });
    plot.yaxis.formatter = new Bokeh.BasicTickFormatter({ power_limit_high: 6, power_limit_low: -4 });
    this.parts = this.listParts();
    this.sources = this.parts.map(([kind, data, index]) => {
      const source = new Bokeh.ColumnDataSource({ data: data() });
      const ink = index === null ? color("gray-line") : color(`line-${index % 8}`);
      if (kind === "others") plot.multi_line({ field: "xs" }, { field: "ys" }, { source, line_color: ink, line_width: 1, line_alpha: 0.7 });
      if (kind === "interval") {
        plot.varea({ x: { field: "x" }, y1: { field: "low" }, y2: { field: "high" }, source, fill_color: ink, fill_alpha: 0.16 });
      }
      if (kind === "line") {
        plot.line({ field: "x" }, { field: "y" }, { source, line_color: ink, line_width: 2, line_join: "round" });
        plot.scatter({ field: "x" }, { field: "y" }, { source, size: data().x.length === 1 ? 7 : 0, fill_color: ink, line_color: null });
      }
      return source;
    });
    this.cursor = new Bokeh.Span({ dimension: "height", location: 0, line_color: color("faint"), line_width: 1, visible: false });
    plot.add_layout(this.cursor);
    this.plot = plot;
    this.ready = Bokeh.Plotting.show(plot, this.box).then((view) => { this.view = view; });
  }

  // The parts in the order of drawing, each with a function that returns its data.
  listParts() {
    const scaled = (line) => (this.unit === 1 ? line.x : line.x.map((x) => x / this.unit));
    const at = (i) => this.lines[i];
    const parts = [];
    if (this.lines.some((line) => line.color === null)) {
      const others = () => this.lines.filter((line) => line.color === null);
      parts.push(["others", () => ({ xs: others().map(scaled), ys: others().map((line) => line.y) }), null]);
    }
    this.lines.forEach((line, i) => {
      if (line.color !== null && line.low) {
        parts.push(["interval", () => ({ x: scaled(at(i)), low: at(i).low, high: at(i).high }), line.color]);
      }
    });
    this.lines.forEach((line, i) => {
      if (line.color !== null) parts.push(["line", () => ({ x: scaled(at(i)), y: at(i).y }), line.color]);
    });
    return parts;
  }

  drawLegend(all, hidden) {
    const colored = all.filter((line) => line.color !== null);
    const others = all.length - colored.length;
    const names = [...colored.map((line) => [line.name, line.color]), ...(others ? [[OTHERS, null]] : [])];
    if (names.length < 2) { this.legend.replaceChildren(); return; }
    const key = JSON.stringify([names, others, [...hidden]]);
    if (this.legend.dataset.key === key) return;
    this.legend.dataset.key = key;
    const focused = document.activeElement?.closest?.(".legend") === this.legend ? document.activeElement.dataset.name : null;
    this.legend.replaceChildren(...names.map(([name, index]) => {
      const [item, button, swatch] = ["li", "button", "span"].map((tag) => document.createElement(tag));
      button.type = "button";
      button.dataset.name = name;
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      swatch.className = "swatch";
      if (index !== null) swatch.style.background = `var(--line-${index % 8})`;
      button.append(swatch, index === null ? `${others.toLocaleString("en")} others` : name);
      button.onclick = () => document.dispatchEvent(new CustomEvent("polyak-toggle", { detail: name }));
      item.append(button);
      return item;
    }));
    if (focused) [...this.legend.querySelectorAll("button")].find((button) => button.dataset.name === focused)?.focus();
  }

  describe() {
    const longest = this.lines.reduce((best, line) => (line.x.length > (best?.x.length ?? -1) ? line : best), null);
    this.guide = longest;
    this.box.setAttribute("aria-label", `${this.chart.title}, ${this.lines.length} lines over ${this.unitName}`);
    this.box.setAttribute("aria-valuemin", "0");
    this.box.setAttribute("aria-valuemax", String(Math.max(0, (longest?.x.length ?? 1) - 1)));
    if (this.position !== null) this.read(Math.min(this.position, (longest?.x.length ?? 1) - 1));
    else {
      this.box.setAttribute("aria-valuenow", "0");
      this.box.setAttribute("aria-valuetext", this.textAt(longest?.x.length - 1) || "no values");
    }
  }

  static number(value) {
    if (!Number.isFinite(value)) return "—";
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
    return value.toLocaleString("en", { maximumFractionDigits: size >= 1000 ? 0 : size >= 10 ? 1 : 4 });
  }

  static nearest(x, value) {
    let [low, high] = [0, x.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] < value) low = middle; else high = middle;
    }
    return Math.abs(x[low] - value) <= Math.abs(x[high] - value) ? low : high;
  }

  textAt(position) {
    const x = this.guide?.x[position];
    if (x === undefined) return "";
    const named = this.lines.filter((line) => line.color !== null && line.x.length);
    const values = named.map((line) => {
      const i = Plot.nearest(line.x, x);
      const interval = line.low ? ` [${Plot.number(line.low[i])}, ${Plot.number(line.high[i])}]` : "";
      return `${named.length > 1 ? `${line.name} ` : ""}${Plot.number(line.y[i])}${interval}`;
    });
    return `${Plot.number(x / this.unit)} ${this.unitName}: ${values.join(", ")}`;
  }

  read(position) {
    this.position = position;
    if (position === null || !this.guide?.x.length) {
      this.reading.textContent = "";
      this.cursor.visible = false;
      return;
    }
    const text = this.textAt(position);
    this.reading.textContent = text;
    this.box.setAttribute("aria-valuenow", String(position));
    this.box.setAttribute("aria-valuetext", text);
    this.cursor.location = this.guide.x[position] / this.unit;
    this.cursor.visible = true;
  }

  readAtPointer(event) {
    const frame = this.view?.frame;
    if (!frame || !this.guide?.x.length) return;
    const left = this.view.el.getBoundingClientRect().left;
    const x = frame.x_scale.invert(event.clientX - left) * this.unit;
    this.read(Plot.nearest(this.guide.x, x));
  }

  press(event) {
    const last = (this.guide?.x.length ?? 1) - 1;
    const stride = Math.max(1, Math.round(last / 50));
    const now = this.position ?? last;
    const moves = { ArrowLeft: now - stride, ArrowDown: now - stride, ArrowRight: now + stride, ArrowUp: now + stride, Home: 0, End: last };
    if (event.key === "Escape") { this.read(null); this.fit(); return; }
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.read(Math.max(0, Math.min(last, moves[event.key])));
  }

  fit() { this.view?.reset?.(); }

  remove() { this.view?.remove?.(); this.figure.querySelectorAll(".reading, .legend").forEach((node) => node.remove()); }
}
