"use strict";
// One client: its trajectory, samples and layers in each run. Chosen in a list, or by a click on it in a figure.
(() => {
  const source = document.getElementById("clients");
  if (!source) return;
  const data = JSON.parse(source.textContent);

  const make = (tag, text, parent) => {
    const element = document.createElement(tag);
    element.textContent = text;
    parent?.append(element);
    return element;
  };
  const panel = make("section", "");
  const choice = document.createElement("select");
  const parts = make("div", "");

  const WIDTH = 400, HEIGHT = 220, LEFT = 44, BOTTOM = 36, TOP = 8;
  const DASHES = ["", "6 3", "6 2 1.5 2", "1.5 2.5"];
  const range = (values) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  };
  const chart = (title, curves, parent) => {
    const known = curves.flatMap(({ x, y }) => x.map((at, i) => [at, y[i]]).filter(([, value]) => value !== null));
    if (!known.length) return;
    const [x0, x1] = range(known.map(([x]) => x)), [y0, y1] = range(known.map(([, y]) => y));
    const across = (x) => LEFT + ((x - x0) / (x1 - x0)) * (WIDTH - LEFT - 8);
    const up = (y) => HEIGHT - BOTTOM - ((y - y0) / (y1 - y0)) * (HEIGHT - BOTTOM - TOP);
    const text = (x, y, said, anchor) => `<text x="${x}" y="${y}" text-anchor="${anchor}" fill="currentColor">${said}</text>`;
    let inside = "";
    for (let i = 0; i <= 4; i += 1) {
      const [x, y] = [x0 + ((x1 - x0) * i) / 4, y0 + ((y1 - y0) * i) / 4];
      inside += `<path d="M${LEFT} ${up(y)}H${WIDTH - 8}" stroke="currentColor" opacity="0.15"/>`;
      inside += text(LEFT - 5, up(y) + 4, Number(y.toPrecision(3)), "end") + text(across(x), HEIGHT - 20, Math.round(x), "middle");
    }
    inside += text((LEFT + WIDTH) / 2, HEIGHT - 4, "round", "middle");
    for (const { x, y, style } of curves) {
      const path = x.map((at, i) => (y[i] === null ? "" : `${at} ${y[i]}`)).filter(Boolean)
        .map((pair) => pair.split(" ").map(Number)).map(([a, b], i) => `${i ? "L" : "M"}${across(a)} ${up(b)}`).join("");
      const look = `stroke="var(--c${style % 8})" stroke-dasharray="${DASHES[(style + (style >> 3)) % 4]}" stroke-width="1.8"`;
      inside += `<path d="${path}" ${look}/>`;
    }
    const figure = make("figure", "", parent);
    make("h3", title, figure);
    figure.insertAdjacentHTML("beforeend", `<svg viewBox="0 0 ${WIDTH} ${HEIGHT}" font-size="12" fill="none">${inside}</svg>`);
    const keys = make("ul", "", figure);
    keys.className = "keys";
    for (const { label, style } of curves) {
      make("b", "●", keys.appendChild(document.createElement("li"))).style.color = `var(--c${style % 8})`;
      keys.lastChild.append(label);
    }
  };
  const tabulated = (title, columns, rows, parent) => {
    const figure = make("figure", "", parent);
    make("h3", title, figure);
    const table = make("table", "", make("div", "", figure));
    table.parentElement.className = "wide";
    const head = table.createTHead().insertRow();
    for (const column of columns) make("th", column, head);
    const body = table.createTBody();
    for (const row of rows) {
      const line = body.insertRow();
      for (const cell of row) make("td", cell ?? "", line);
    }
    return body;
  };

  const show = (client) => {
    choice.value = client;
    parts.replaceChildren();
    const titles = new Set(data.runs.flatMap((run) => run.trajectories.map(({ title }) => title)));
    for (const title of titles) {
      const curves = data.runs.flatMap((run) =>
        run.trajectories.filter((one) => one.title === title && one.values[client])
          .map(({ rounds, values }) => ({ x: rounds, y: values[client], label: run.label, style: run.style })));
      chart(title, curves, parts);
    }
    data.counts.forEach(({ classes, train, test }, place) => {
      if (!train[client]) return;  // a run with fewer clients
      const runs = data.runs.filter((run) => run.counts === place).map((run) => run.label);
      const most = Math.max(...train[client]);
      const held = train[client].map((number, label) => [label, number, test[client][label]]).filter(([, a, b]) => a || b);
      const named = held.map(([label, ...numbers]) => [classes[label], ...numbers]);
      const title = data.counts.length > 1 ? `Samples (${runs.join(", ")})` : "Samples";
      const body = tabulated(title, ["class", "training", "test"], named, parts);
      held.forEach(([, number], i) => {
        body.rows[i].cells[1].prepend(document.createElement("i"));
        body.rows[i].cells[1].firstChild.style.width = `${(6 * number) / most}rem`;
      });
    });
    for (const measure of new Set(data.runs.flatMap((run) => Object.keys(run.layers)))) {
      const runs = data.runs.filter((run) => run.layers[measure]);
      const layers = [...new Set(runs.flatMap((run) => Object.keys(run.layers[measure])))];
      const rows = layers.map((layer) => [layer, ...runs.map((run) => run.layers[measure][layer]?.[client] ?? "")]);
      tabulated(`Layers: ${measure}`, ["layer", ...runs.map((run) => run.label)], rows, parts);
    }
  };
  panel.id = "client";
  make("h2", "Client ", panel).append(choice);
  make("p", "Choose one here, or click on a client in a figure.", panel);
  parts.className = "parts";
  panel.append(parts);
  for (let client = 0; client < data.clients; client += 1) make("option", client, choice).value = client;
  choice.addEventListener("change", () => show(Number(choice.value)));
  document.addEventListener("client", ({ detail }) => {
    if (detail >= data.clients) return;
    show(detail);
    panel.scrollIntoView({ behavior: "smooth" });
  });
  document.getElementById("s2").after(panel);
  show(0);
})();
