"use strict";
// Decodes the charts, draws those on the screen, and keeps a live page up to date. Texts of a run are set as text only.
(() => {
  const state = { axis: "steps", hidden: new Set(), sort: null, filter: "", all: false };
  let charts = new Map();
  const drawn = new Map(); // chart name -> Plot

  // -- data --------------------------------------------------------------------------------------------------------

  function decode(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new Float32Array(bytes.buffer);
  }

  function readCharts(data) {
    const cache = [];
    const array = (i) => (cache[i] ??= decode(data.arrays[i]));
    const line = (raw) => ({
      name: raw.name, color: raw.color,
      get x() { return array(raw.x); }, get y() { return array(raw.y); },
      get low() { return raw.low === undefined ? null : array(raw.low); },
      get high() { return raw.high === undefined ? null : array(raw.high); },
    });
    charts = new Map(data.charts.map((chart) => [chart.name, {
      ...chart,
      lines: Object.fromEntries(Object.entries(chart.lines).map(([axis, lines]) => [axis, lines.map(line)])),
    }]));
  }

  function axisOf(chart) { return chart.lines[state.axis] ? state.axis : Object.keys(chart.lines)[0]; }

  // -- charts ------------------------------------------------------------------------------------------------------

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  }, { rootMargin: "200px" });

  function draw(figure) {
    const chart = charts.get(figure.dataset.chart);
    if (!chart) return;
    seen.unobserve(figure);
    const plot = drawn.get(chart.name) ?? new Plot(figure);
    drawn.set(chart.name, plot);
    plot.show(chart, axisOf(chart), state.hidden);
    plot.ready.then(() => performance.mark("polyak-drawn"));
  }

  function connectFigures() {
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      const plot = drawn.get(figure.dataset.chart);
      if (plot && plot.figure !== figure) { plot.remove(); drawn.delete(figure.dataset.chart); }
      if (drawn.has(figure.dataset.chart)) draw(figure); else seen.observe(figure);
    }
    for (const [name, plot] of drawn) if (!plot.figure.isConnected) { plot.remove(); drawn.delete(name); }
  }

  function redraw() { for (const plot of [...drawn.values()]) draw(plot.figure); }

  document.addEventListener("polyak-toggle", (event) => {
    const name = event.detail;
    state.hidden.has(name) ? state.hidden.delete(name) : state.hidden.add(name);
    redraw();
  });
  document.getElementById("axis").addEventListener("change", (event) => { state.axis = event.target.value; redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  // -- sections, tables, buttons -----------------------------------------------------------------------------------

  function listSections() {
    const nav = document.getElementById("sections");
    const links = [...document.querySelectorAll("section[data-title]")].map((section) => {
      const link = document.createElement("a");
      link.href = `#${section.id}`;
      link.textContent = section.dataset.title;
      return link;
    });
    if (nav.textContent !== links.map((link) => link.textContent).join("")) nav.replaceChildren(...links);
    const hasAxes = [...charts.values()].some((chart) => chart.lines.steps && chart.lines.time);
    document.getElementById("axis").hidden = !hasAxes;
  }

  function valueOf(row, column) {
    const cell = row.cells[column];
    const value = cell.dataset.value;
    return value === undefined ? cell.textContent.trim().toLowerCase() : Number(value);
  }

  function compare(a, b) {
    const [x, y] = [typeof a === "number", typeof b === "number"];
    if (x !== y) return x ? -1 : 1;
    if (!x) return a.localeCompare(b, undefined, { numeric: true });
    return Number.isNaN(a) ? (Number.isNaN(b) ? 0 : 1) : Number.isNaN(b) ? -1 : a - b;
  }

  function sortTable(table, column, direction) {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [valueOf(row, column), row]);
    rows.sort((a, b) => direction * compare(a[0], b[0]));
    body.append(...rows.map((pair) => pair[1]));
    if (table.closest("#runs")) applyFilter();
    [...table.tHead.rows[0].cells].forEach((cell, i) => {
      if (i === column) cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
  }

  function connectTables() {
    for (const table of document.querySelectorAll("table[data-sorts]")) {
      if (table.dataset.connected) continue;
      table.dataset.connected = "yes";
      const key = table.closest("section").id + table.parentElement.getAttribute("aria-label");
      [...table.tHead.rows[0].cells].forEach((cell, column) => {
        if (cell.querySelector(".visually-hidden")) return;
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = cell.textContent;
        cell.replaceChildren(button);
        button.addEventListener("click", () => {
          const direction = cell.getAttribute("aria-sort") === "ascending" ? -1 : 1;
          state.sort = { ...state.sort, [key]: [column, direction] };
          sortTable(table, column, direction);
        });
      });
      if (state.sort?.[key]) sortTable(table, ...state.sort[key]);
    }
    const filter = document.getElementById("filter");
    if (!filter) return;
    filter.value = state.filter;
    filter.oninput = () => { state.filter = filter.value; applyFilter(); };
    applyFilter();
    connectPicks();
  }

  function applyFilter() {
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...document.querySelectorAll("#runs tbody tr")];
    const all = document.getElementById("show-all");
    const most = all && !state.all ? Number(all.dataset.rows) : Infinity;
    let count = 0;
    for (const row of rows) {
      const text = words.length ? row.textContent.toLowerCase() : "";
      if (words.every((word) => text.includes(word))) count += 1;
      else { row.hidden = row.cut = true; continue; }
      row.cut = false;
      if (row.hidden !== count > most) row.hidden = count > most;
    }
    if (all) {
      all.hidden = count <= most;
      all.onclick = () => { state.all = true; applyFilter(); };
    }
    document.getElementById("shown").textContent = words.length ? `${count} of ${rows.length} runs` : `${rows.length} runs`;
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const text = button.previousElementSibling.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.previousElementSibling);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });

  // -- live pages --------------------------------------------------------------------------------------------------

  const poll = Number(document.body.dataset.live ?? 0);
  let version = null;
  let timer = 0;
  let request = null;

  function connectPicks() {
    const boxes = () => [...document.querySelectorAll("#runs input[name=pick]")];
    const pick = () => {
      const query = new URLSearchParams(location.search);
      query.delete("run");
      for (const box of boxes()) if (box.checked) query.append("run", box.value);
      const group = document.getElementById("group-by").value;
      group ? query.set("group-by", group) : query.delete("group-by");
      history.replaceState(null, "", `?${query}`);
      refresh();
    };
    for (const box of boxes()) box.onchange = pick;
    const all = document.getElementById("pick-shown");
    if (!all) return;
    all.onclick = () => { for (const box of boxes()) box.checked = !box.closest("tr").cut; pick(); };
    document.getElementById("pick-none").onclick = () => { for (const box of boxes()) box.checked = false; pick(); };
    document.getElementById("group-by").onchange = pick;
  }

  function replaceSections(html) {
    const fresh = new DOMParser().parseFromString(html, "text/html");
    const main = document.getElementById("content");
    const focused = document.activeElement;
    const focus = focused && main.contains(focused) ? [focused.id, focused.value, focused.name] : null;
    const old = new Map([...main.children].filter((node) => node.id).map((node) => [node.id, node]));
    const nodes = [...fresh.body.children].map((node) => {
      const before = old.get(node.id);
      if (before && before.dataset.source === node.outerHTML) return before;
      node.dataset.source = node.outerHTML;
      if (before) keepState(before, node);
      return document.adoptNode(node);
    });
    if (nodes.length !== main.children.length || nodes.some((node, i) => node !== main.children[i])) {
      const top = scrollY;
      main.replaceChildren(...nodes);
      scrollTo({ top, behavior: "instant" });
    }
    if (focus && document.activeElement === document.body) {
      // A figure that was moved has lost its focus.
      const again = focused.isConnected ? focused : (focus[0] && document.getElementById(focus[0]))
        || [...main.querySelectorAll("input")].find((node) => node.value === focus[1] && node.name === focus[2]);
      again?.focus({ preventScroll: true });
    }
  }

  // Figures are moved over, so that a zoomed chart stays as it is; open parts stay open.
  function keepState(before, after) {
    for (const figure of after.querySelectorAll("figure[data-chart]")) {
      const plot = drawn.get(figure.dataset.chart);
      if (plot && before.contains(plot.figure)) figure.replaceWith(plot.figure);
    }
    const open = [...before.querySelectorAll("details")].map((node) => node.open);
    after.querySelectorAll("details").forEach((node, i) => { node.open = open[i] ?? node.open; });
    const [from, to] = [before.querySelectorAll(".table"), after.querySelectorAll(".table")];
    to.forEach((node, i) => requestAnimationFrame(() => { if (from[i]) node.scrollTop = from[i].scrollTop; }));
    const [was, is] = [before.querySelector("video"), after.querySelector("video")];
    if (was && is && was.getAttribute("src") === is.getAttribute("src")) is.replaceWith(was);
  }

  function say(text, kind) {
    const chip = document.getElementById("connection");
    if (chip.textContent !== text) chip.textContent = text;
    chip.className = `chip ${kind}`;
  }

  async function refresh() {
    clearTimeout(timer);
    request?.abort();
    const mine = (request = new AbortController());
    try {
      const headers = version ? { "If-None-Match": version } : {};
      const answer = await fetch(`/update${location.search}`, { headers, signal: mine.signal, cache: "no-store" });
      if (answer.status === 200) {
        const data = await answer.json();
        if (mine !== request) return;
        version = answer.headers.get("ETag");
        readCharts(data.charts);
        document.title = data.title;
        const head = document.getElementById("head");
        if (head.dataset.source !== data.head) { head.innerHTML = data.head; head.dataset.source = data.head; }
        replaceSections(data.content);
        connect();
        redraw();
      } else if (answer.status !== 304) {
        throw new Error(await answer.text());
      }
      say("up to date", "good");
    } catch (error) {
      if (mine !== request) return;
      say("server stopped", "bad");
    }
    if (mine === request) timer = setTimeout(refresh, poll * 1000);
  }

  document.addEventListener("visibilitychange", () => {
    if (!poll) return;
    if (document.hidden) { clearTimeout(timer); request?.abort(); request = null; } else refresh();
  });

  function connect() { listSections(); connectTables(); connectFigures(); }

  readCharts(JSON.parse(document.getElementById("charts").textContent));
  connect();
  if (poll && !document.hidden) timer = setTimeout(refresh, poll * 1000);
})();
