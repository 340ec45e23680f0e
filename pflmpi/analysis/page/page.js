"use strict";
// What a page can do besides being read: sort tables, say the values below the pointer. `client.js` shows a client.
(() => {
  const short = (value) => String(Number(value.toPrecision(4)));

  // --- tables: a click on a heading sorts; empty cells stay below

  const sorted = (head, column) => {
    const body = head.closest("table").tBodies[0];
    const cells = [...body.rows].map((row) => [row.cells[column].textContent.trim(), row]);
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

  // --- figures: the values below the pointer

  const REACH = 40; // pixels of a drawing from the pointer to a point

  const value = ([start, end, low, high, log], pixel) => {
    const share = (pixel - start) / (end - start);
    return log ? low * (high / low) ** share : low + share * (high - low);
  };
  const said = (names, axis, pixel) => {
    const found = value(axis, pixel);
    return names ? names[Math.round(found) - 1] : short(found);
  };
  const numbers = (cells) => {
    const bytes = Uint8Array.from(atob(cells.values), (letter) => letter.charCodeAt(0));
    return (cells.numbers ??= new Uint16Array(bytes.buffer));
  };
  const ofCells = (hover, x, y) => {
    const column = Math.round(value(hover.x, x)) - 1;
    const row = Math.round(value(hover.y, y)) - 1;
    if (!(row in hover.yn) || !(column in hover.xn)) return null;
    const number = numbers(hover.cells)[row * hover.xn.length + column];
    const text = number ? short(hover.cells.low + (number - 1) * hover.cells.step) : "none";
    const where = `${hover.yl} ${hover.yn[row]}, ${hover.xl} ${hover.xn[column]}`;
    return { text: `${where}\n${hover.vl}: ${text}`, client: hover.yl.startsWith("client") ? hover.yn[row] : "" };
  };
  const ofParts = (hover, x) => {
    const places = hover.parts[hover.xl];
    const wanted = value(hover.x, x);
    const place = places.reduce((best, one, i) => (Math.abs(one - wanted) < Math.abs(places[best] - wanted) ? i : best), 0);
    const lines = Object.entries(hover.parts).map(([name, values]) => `${name}: ${values[place]}`);
    if (hover.xn) lines[0] = hover.xn[place];
    return { text: lines.join("\n"), client: "" };
  };
  const points = (path) =>
    (path.places ??= [...path.getAttribute("d").matchAll(/[ML](-?[\d.]+) (-?[\d.]+)/g)].map((m) => [+m[1], +m[2]]));
  const ofPoints = (svg, hover, x, y) => {
    let nearest = null;
    for (const path of svg.querySelectorAll("path[data-label]")) {
      points(path).forEach(([right, down], place) => {
        const distance = Math.hypot(right - x, down - y);
        if (distance < (nearest?.distance ?? REACH)) nearest = { distance, path, place, right, down };
      });
    }
    if (!nearest) return null;
    const { label, names } = nearest.path.dataset;
    const name = names?.split("|")[nearest.place] ?? "";
    const lines = [label, `${hover.xl}: ${said(hover.xn, hover.x, nearest.right)}`];
    lines.push(`${hover.yl}: ${name && hover.yn ? name : said(hover.yn, hover.y, nearest.down)}`);
    const client = name || (label.match(/^client (\d+)/)?.[1] ?? "");
    if (/^\d+$/.test(name) && !hover.yn) lines.push(`client: ${name}`);
    return { text: lines.join("\n"), client };
  };

  const box = document.createElement("div");
  document.body.append(box);
  box.id = "said";
  box.hidden = true;
  const below = (svg, event) => {
    const hover = (svg.hover ??= JSON.parse(svg.dataset.hover));
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    if (hover.cells) return ofCells(hover, x, y);
    return hover.parts ? ofParts(hover, x) : ofPoints(svg, hover, x, y);
  };
  for (const svg of document.querySelectorAll("svg[data-hover]")) {
    svg.addEventListener("pointermove", (event) => {
      const found = below(svg, event);
      box.hidden = !found;
      if (!found) return;
      box.textContent = found.text;
      box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8))}px`;
      box.style.top = `${Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8)}px`;
    });
    svg.addEventListener("pointerleave", () => (box.hidden = true));
    svg.addEventListener("click", (event) => {
      const client = parseInt(below(svg, event)?.client, 10);
      if (client >= 0) document.dispatchEvent(new CustomEvent("client", { detail: client }));
    });
  }
})();
