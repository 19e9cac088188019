"use strict";
(() => {
  const PERIOD_MS = 1000, TIMEOUT_MS = 10000, UNKNOWN = "-", HEIGHT = 40;

  // The same texts as those of formats.py.
  const number = (value) => {
    const digits = Number.isInteger(value) || value >= 100 ? 0 : value >= 10 ? 1 : 2;
    return value.toLocaleString("en-US", {
      minimumFractionDigits: digits, maximumFractionDigits: digits, roundingMode: "halfEven",
    });
  };
  const bytes = (value) => {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (value < 1024) return `${number(value)} ${unit}`;
      value /= 1024;
    }
    return `${number(value)} TiB`;
  };
  const seconds = (value) => {
    if (value < 60) return `${number(value)} s`;
    const minutes = Math.floor(value / 60), hours = Math.floor(minutes / 60);
    if (minutes < 60) return `${minutes} min ${Math.floor(value) % 60} s`;
    return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  };
  const ranges = (values) => {
    const runs = [];
    for (const value of [...values].sort((a, b) => a - b)) {
      if (runs.length && runs.at(-1).at(-1) === value - 1) runs.at(-1)[1] = value;
      else runs.push([value]);
    }
    return runs.map((run) => run.join("-")).join(",");
  };
  const FORMATS = {
    number, bytes, seconds, ranges,
    percent: (value) => number(Math.round(1000 * value) / 10),
    texts: (value) => value.join("; "),
    flag: (value) => (value ? "yes" : "no"),
    codes: (value) => Object.entries(value).map(([code, count]) => `${code} ${number(count)}`).join(", "),
    time: (value) => new Date(Math.floor(value) * 1000).toISOString().slice(0, 19).replace("T", " "),
  };
  const format = (kind, value) => {
    if (value === null || value === undefined) return UNKNOWN;
    return (FORMATS[kind] ?? String)(value) || UNKNOWN;
  };

  const write = (node, text) => {
    if (node.textContent !== text) node.textContent = text;
  };
  const make = (name, attributes = {}, ...children) => {
    const node = document.createElementNS(
      name === "svg" || name === "path" ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const resize = (parent, count, create) => {
    while (parent.children.length > count) parent.lastElementChild.remove();
    while (parent.children.length < count) parent.append(create());
  };

  const updateTable = (table, status) => {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    const entries = status[table.dataset.entries], section = table.closest("section");
    const row = () => make("tr", {}, ...heads.map(({ dataset }, index) =>
      make(index ? "td" : "th", index ? { "data-kind": dataset.kind } : { "data-kind": dataset.kind, scope: "row" })));
    resize(body, entries.length, row);
    entries.forEach((entry, line) => heads.forEach(({ dataset }, index) => {
      const cell = body.rows[line].cells[index], value = entry[dataset.field];
      write(cell, format(dataset.kind, value));
      if (dataset.kind === "state" && index) cell.dataset.value = value;
    }));
    const left = status.left_out[table.dataset.entries] ?? 0;
    section.querySelector(".empty").hidden = entries.length > 0;
    section.querySelector(".more").hidden = !left;
    write(section.querySelector(".more"), `${left} more`);
  };

  const path = (values, high) => {
    let isOpen = false;
    return values.map((value, x) => {
      const wasOpen = isOpen;
      isOpen = value !== null;
      if (!isOpen) return "";
      const y = HEIGHT - 1 - Math.round((value / (high || 1)) * (HEIGHT - 2));
      return wasOpen ? `L${x} ${y}` : `M${x} ${y}h0`;
    }).join("");
  };
  const updatePlot = (figure, lines, series) => {
    const drawn = lines.map(([label, measure]) => [label, series[measure] ?? []]);
    const high = drawn.flatMap(([, values]) => values).reduce((most, value) => Math.max(most, value ?? 0), 0);
    const newest = drawn.map(([label, values]) => `${label} ${format("number", values.at(-1))}`);
    write(figure.querySelector("span"), `${newest.join(", ")}, max ${number(high)}`);
    drawn.forEach(([, values], index) => {
      figure.querySelectorAll("path")[index].setAttribute("d", path(values, high));
    });
  };
  const figures = document.querySelector("#figures"), PLOTS = JSON.parse(figures.dataset.plots);
  const article = () => make("article", {}, make("h3"), make("div", { class: "plots" },
    ...PLOTS.map(([title, lines]) => make("figure", {},
      make("figcaption", {}, `${title}: `, make("span")),
      make("svg", { viewBox: `0 0 ${figures.dataset.samples} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
        ...lines.map(([label]) => make("path", { class: label })))))));
  const updatePlots = (status) => {
    const models = status.models.filter(({ series }) => Object.keys(series).length);
    resize(figures, models.length, article);
    models.forEach(({ name, version, series }, index) => {
      const node = figures.children[index];
      write(node.querySelector("h3"), `${name} ${version}`);
      node.querySelectorAll("figure").forEach((figure, plot) => updatePlot(figure, PLOTS[plot][1], series));
    });
  };

  const updateReady = ({ ready, reasons, version }) => {
    const node = document.querySelector("#ready"), list = node.querySelector("ul");
    node.dataset.value = ready ? "ready" : "not ready";
    write(node.querySelector("strong"), ready ? "Ready" : "Not ready");
    document.title = `${ready ? "Ready" : "Not ready"}: Iskander ${version}`;
    resize(list, reasons.length, () => make("li"));
    reasons.forEach((reason, index) => write(list.children[index], reason));
  };
  const update = (status) => {
    // A restarted gateway may have another version of the page.
    if (String(status.started_ms) !== document.body.dataset.started) location.reload();
    write(document.querySelector("#uptime"), seconds(status.uptime_s));
    updateReady(status);
    document.querySelectorAll("table[data-entries]").forEach((table) => updateTable(table, status));
    updatePlots(status);
  };

  const button = document.querySelector("#pause"), answer = document.querySelector("#answer");
  let isPaused = false, timer = null, isBusy = false;
  const poll = async () => {
    timer = null;
    if (isPaused || isBusy || document.hidden) return;
    isBusy = true;
    try {
      const response = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
      if (!response.ok) throw new Error(`status ${response.status}`);
      update(await response.json());
      write(answer, "");
    } catch {
      if (!answer.textContent) {
        write(answer, `No answer from the server since ${new Date().toISOString().slice(11, 19)} UTC`);
      }
    }
    isBusy = false;
    schedule();
  };
  const schedule = () => {
    if (timer === null && !isPaused && !document.hidden) timer = setTimeout(poll, PERIOD_MS);
  };
  document.addEventListener("visibilitychange", schedule);
  button.addEventListener("click", () => {
    isPaused = !isPaused;
    write(button, isPaused ? "Resume updates" : "Pause updates");
    schedule();
  });
  button.hidden = false;
  document.querySelector("#static").hidden = true;
  schedule();
})();
