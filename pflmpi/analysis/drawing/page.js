"use strict";
// Sorts tables, replaces the pictures by interactive charts, and links the selected client across them.
(() => {
  // --- tables: a click on a heading sorts; empty cells stay below

  const sorted = (head, column) => {
    const body = head.closest("table").tBodies[0];
    const cells = [...body.rows].map((row) => [row.cells[column].textContent.replace(/ ±.*/, "").trim(), row]);
    const numeric = cells.every(([text]) => text === "" || !Number.isNaN(Number(text)));
    const before = head.getAttribute("aria-sort");
    const falling = before === "none" ? numeric : before === "ascending";
    const order = (a, b) => (numeric ? Number(a) - Number(b) : a.localeCompare(b, undefined, { numeric: true }));
    cells.sort(([a], [b]) => (a === "" || b === "" ? (a === "") - (b === "") : (falling ? -1 : 1) * order(a, b)));
    body.append(...cells.map(([, row]) => row));
    for (const other of head.parentElement.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
  };
  for (const table of document.querySelectorAll("table")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.setAttribute("aria-sort", "none");
      head.tabIndex = 0;
      head.addEventListener("click", () => sorted(head, column));
      head.addEventListener("keydown", (event) => event.key === "Enter" && sorted(head, column));
    });
  }

  // --- charts: drawn by Vega one after the other, in place of the pictures

  const source = document.getElementById("charts");
  if (!source) return;
  const charts = JSON.parse(source.textContent);
  const config = JSON.parse(document.getElementById("config").textContent);
  const PANEL = 290; // pixels of one of several panels
  const parameter = (chart) => (chart.params ?? []).find(({ name }) => name === "client");
  const choices = [...new Set(charts.flatMap((chart) => parameter(chart)?.bind?.options ?? []))].sort((a, b) => a - b);
  const views = []; // those in which a client can stand out
  let client = null;

  const draw = async (box) => {
    const chart = { ...charts[box.dataset.chart], config };
    if (chart.columns) chart.columns = Math.max(1, Math.min(chart.columns, Math.floor(box.clientWidth / PANEL)));
    const choice = parameter(chart);
    delete choice?.bind; // one list for all
    if (choice && client !== null) choice.value = client;
    const place = document.createElement("div");
    const plain = { actions: false, defaultStyle: false, tooltip: { disableDefaultStyle: true } };
    const { view } = await vegaEmbed(place, chart, { mode: "vega-lite", ast: true, renderer: "svg", ...plain });
    box.replaceChildren(place);
    if (!choice) return;
    views.push(view);
    view.signal("client", client ?? choice.value);
    view.addEventListener("click", (event, item) => item?.datum?.client >= 0 && show(item.datum.client));
    await view.runAsync();
  };
  const show = (chosen) => {
    client = Number(chosen);
    document.querySelector("section.client details").open = true;
    if (choices.includes(client)) list.value = client;
    for (const view of views) view.signal("client", client).runAsync();
  };
  const list = document.createElement("select");
  list.id = "client";
  for (const choice of choices) list.add(new Option(choice));
  list.addEventListener("change", () => show(list.value));
  const label = document.createElement("label");
  label.append("Client ", list, " in all figures; a click on a client in a figure chooses it, too.");
  document.querySelector("section.client summary + div")?.prepend(label);

  const drawn = new Set();
  const drawAll = async (boxes) => {
    for (const box of boxes) {
      if (drawn.has(box) || box.closest("details:not([open])")) continue; // which has no width yet
      drawn.add(box);
      await draw(box).catch((error) => console.error(error));
      await new Promise((done) => setTimeout(done)); // a reader who scrolls comes first
    }
  };
  for (const part of document.querySelectorAll("details")) {
    part.addEventListener("toggle", () => drawAll(part.querySelectorAll("[data-chart]")));
  }
  drawAll(document.querySelectorAll("[data-chart]"));
})();
