"use strict";
// Draws one drawing on a canvas: zoom with the wheel or + and -, move by dragging or the arrow keys.
// The data is the JSON that html.py writes; times are integers from 0 to `data.ticks`.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("drawing");
  const tip = document.getElementById("tip");
  const context = canvas.getContext("2d");
  // Many rows are lower, and have the times above them as well as below, which may be out of sight.
  const isLong = data.rows.length > 16, ROW = isLong ? 14 : 22, GAP = isLong ? 4 : 8, AXIS = 24, TOP = isLong ? 24 : 6;
  const MEMORY = data.rows.some((row) => row.memory.length) ? (isLong ? 9 : 18) : 0;
  const pitch = ROW + MEMORY + GAP;
  const names = data.rows.map((row) => row.name);
  const left = 16 + 7 * Math.max(0, ...names.map((name) => name.length));
  let from = 0, to = data.ticks, pending = false, width = 0;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name.replaceAll(" ", "-")}`).trim();
  let colours = {}, stripes = null;
  const readColours = () => {
    const wanted = [...data.kinds, "text", "faint", "lines", "memory", "cap", "background", "cell-text"];
    colours = Object.fromEntries(wanted.map((name) => [name, colour(name)]));
    const tile = document.createElement("canvas"), lines = tile.getContext("2d");
    tile.width = tile.height = 6;
    lines.strokeStyle = colours.faint;
    lines.globalAlpha = 0.45;
    for (const at of [-6, 0, 6]) { lines.moveTo(at, 6); lines.lineTo(at + 6, 0); }
    lines.stroke();
    stripes = context.createPattern(tile, "repeat");
  };

  const x = (tick) => left + ((tick - from) / (to - from)) * (width - left);
  const tick = (at) => from + ((at - left) / (width - left)) * (to - from);

  const amount = (count) => {
    if (data.held === "activations") return `${count} activation${count === 1 ? "" : "s"}`;
    for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
      if (count >= size) return `${+(count / size).toPrecision(3)} ${unit}`;
    return `${Math.round(count)} B`;
  };
  const time = (ticks) => {
    const value = (ticks * data.end) / data.ticks;
    if (data.unit === "forwards") return `${+value.toPrecision(4)}`;
    for (const [unit, scale] of [["s", 1], ["ms", 1e3], ["us", 1e6]])
      if (Math.abs(value) * scale >= 1 || unit === "us") return value ? `${+(value * scale).toPrecision(4)} ${unit}` : "0";
  };

  // The first of the cells that ends behind a time; cells are ascending and do not overlap.
  const firstBehind = (ends, at) => {
    let low = 0, high = ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] <= at) low = middle + 1; else high = middle;
    }
    return low;
  };

  const drawCells = (cells, top, height, alpha, withText) => {
    const first = firstBehind(cells.end, from), behind = firstBehind(cells.start, to);
    context.globalAlpha = alpha;
    if (behind - first > (width - left) / 3) drawShares(cells, first, behind, top, height);
    else for (let i = first; i < behind; i++) {
      const begin = Math.max(left, x(cells.start[i])), finish = Math.min(width, x(cells.end[i]));
      const size = finish - begin;
      context.fillStyle = colours[data.kinds[cells.kind[i]]];
      const shown = Math.max(size - (size > 3 ? 0.7 : 0), 0.3);
      context.fillRect(begin, top, shown, height);
      if (size > 3 && data.striped.includes(cells.kind[i])) {
        context.fillStyle = stripes;
        context.fillRect(begin, top, shown, height);
      }
      if (withText && cells.text[i] && size > 7 * cells.text[i].length + 2) {
        context.fillStyle = colours["cell-text"];
        context.fillText(cells.text[i], begin + size / 2, top + height / 2 + 4);
      }
    }
    context.globalAlpha = 1;
  };

  // The means of the columns up to `reach` before and behind each.
  const smooth = (values, reach) => {
    const sums = new Float64Array(values.length + 1), means = new Float32Array(values.length);
    values.forEach((value, k) => { sums[k + 1] = sums[k] + value; });
    for (let k = 0; k < values.length; k++) {
      const low = Math.max(0, k - reach), high = Math.min(values.length, k + reach + 1);
      means[k] = (sums[high] - sums[low]) / (high - low);
    }
    return means;
  };

  // Too many cells to tell apart: in each column the height of a colour is its share of the time.
  const drawShares = (cells, first, behind, top, height) => {
    const count = Math.floor((width - left) / 2), shares = data.kinds.map(() => new Float32Array(count));
    const perTick = count / (to - from);
    for (let i = first; i < behind; i++) {
      const begin = Math.max(0, (cells.start[i] - from) * perTick);
      const finish = Math.min(count, (cells.end[i] - from) * perTick), mine = shares[cells.kind[i]];
      for (let column = Math.floor(begin); column < finish; column++)
        mine[column] += Math.min(finish, column + 1) - Math.max(begin, column);
    }
    // A column holds few cells, and not as many as the next: their shares are those of some cells around.
    const reach = Math.min(6, Math.ceil((1.2 * count) / (behind - first)));
    shares.forEach((mine, number) => { shares[number] = smooth(smooth(mine, reach), reach); });
    const base = new Float32Array(count).fill(top + height);
    data.kinds.forEach((kind, number) => {
      context.fillStyle = colours[kind];
      for (let column = 0; column < count; column++) {
        const size = height * shares[number][column];
        if (!size) continue;
        base[column] -= size;
        context.fillRect(left + 2 * column, base[column], 2, size);
      }
    });
  };

  const drawMemory = (memory, base) => {
    const height = (size) => (data.top ? ((MEMORY - 3) * size) / data.top : 0);
    context.fillStyle = colours.memory;
    context.beginPath();
    context.moveTo(left, base);
    let held = 0;
    for (const [at, size] of memory) {
      if (at > from) {
        const place = Math.min(width, x(at));
        context.lineTo(place, base - height(held));
        context.lineTo(place, base - height(at < to ? size : held));
      } else context.lineTo(left, base - height(size));
      held = at < to ? size : held;
    }
    context.lineTo(Math.min(width, x(data.ticks)), base - height(held));
    context.lineTo(Math.min(width, x(data.ticks)), base);
    context.fill();
    if (data.cap && data.cap <= data.top) {
      context.strokeStyle = colours.cap;
      context.setLineDash([3, 3]);
      context.beginPath();
      context.moveTo(left, base - height(data.cap));
      context.lineTo(width, base - height(data.cap));
      context.stroke();
      context.setLineDash([]);
    }
  };

  const drawAxis = (bottom) => {
    const rough = (to - from) / Math.max(2, Math.floor((width - left) / 110));
    const unit = data.ticks / data.end, power = 10 ** Math.floor(Math.log10(rough / unit));
    const step = unit * power * [1, 2, 5, 10].find((factor) => factor * power >= (rough / unit) * (1 - 1e-9));
    context.textAlign = "center";
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      context.fillStyle = colours.lines;
      context.fillRect(x(at), TOP - 4, 1, bottom - TOP + 4);
      context.fillStyle = colours.faint;
      for (const base of isLong ? [TOP - 8, bottom + 16] : [bottom + 16])
        context.fillText(time(Math.round(at)), Math.min(Math.max(x(at), left + 10), width - 24), base);
    }
  };

  const draw = () => {
    pending = false;
    const ratio = window.devicePixelRatio || 1, height = TOP + pitch * data.rows.length + AXIS;
    width = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "11px system-ui, sans-serif";
    drawAxis(TOP + pitch * data.rows.length);
    // The times between which the page shows the drawing, for whoever looks at the page by a script.
    canvas.dataset.from = (from * data.end) / data.ticks;
    canvas.dataset.to = (to * data.end) / data.ticks;
    data.rows.forEach((row, number) => {
      const top = TOP + number * pitch;
      context.textAlign = "center";
      const both = row.planned.start.length && row.cells.start.length;
      drawCells(row.planned, top, ROW, row.cells.start.length ? 0.38 : 1, !both);
      drawCells(row.cells, top + (both ? 5 : 0), ROW - (both ? 5 : 0), 1, true);
      if (row.memory.length) drawMemory(row.memory, top + ROW + MEMORY - 1);
      context.fillStyle = colours.background;
      context.fillRect(0, top, left - 2, pitch);
      context.textAlign = "right";
      context.fillStyle = colours.text;
      context.fillText(row.name, left - 8, top + ROW / 2 + 4);
    });
  };
  const redraw = () => { if (!pending) { pending = true; requestAnimationFrame(draw); } };

  const show = (first, last) => {
    const size = Math.min(Math.max(last - first, data.ticks / 1e5), data.ticks);
    from = Math.min(Math.max(0, first), data.ticks - size);
    to = from + size;
    redraw();
  };
  const zoom = (factor, at) => show(at - (at - from) * factor, at + (to - at) * factor);
  const middle = () => (from + to) / 2;

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(event.deltaY / 400), tick(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("dblclick", () => show(0, data.ticks));
  let dragged = null;
  canvas.addEventListener("pointerdown", (event) => {
    dragged = event.clientX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged !== null) {
      const moved = ((dragged - event.clientX) / (width - left)) * (to - from);
      dragged = event.clientX;
      show(from + moved, to + moved);
    }
    point(event);
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });

  const point = (event) => {
    const number = Math.floor((event.offsetY - TOP) / pitch), row = data.rows[number], at = tick(event.offsetX);
    tip.hidden = true;
    if (!row || event.offsetX < left) return;
    const lines = [];
    const cells = row.cells.start.length ? row.cells : row.planned;
    const i = firstBehind(cells.end, at);
    if (i < cells.start.length && cells.start[i] <= at) {
      lines.push(cells.title[i] || data.kinds[cells.kind[i]]);
      lines.push(`${time(cells.end[i] - cells.start[i])}, from ${time(cells.start[i])} to ${time(cells.end[i])}`);
    }
    if (row.memory.length) {
      let held = 0;
      for (const [begin, size] of row.memory) { if (begin > at) break; held = size; }
      lines.push(`holds ${amount(held)}${data.cap ? ` of ${amount(data.cap)}` : ""}`);
    }
    if (!lines.length) return;
    tip.textContent = [row.name, ...lines].join("\n");
    tip.hidden = false;
    const edge = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.min(event.clientX + 14, edge)}px`;
    tip.style.top = `${event.clientY + 16}px`;
  };

  const keys = {
    "+": () => zoom(0.6, middle()), "=": () => zoom(0.6, middle()), "-": () => zoom(1 / 0.6, middle()),
    "0": () => show(0, data.ticks),
    ArrowLeft: () => show(from - (to - from) / 5, to - (to - from) / 5),
    ArrowRight: () => show(from + (to - from) / 5, to + (to - from) / 5),
  };
  canvas.addEventListener("keydown", (event) => {
    if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
  });
  for (const button of document.querySelectorAll("[data-key]"))
    button.addEventListener("click", () => keys[button.dataset.key]());

  readColours();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); redraw(); });
  new ResizeObserver(redraw).observe(canvas);
  draw();
})();
