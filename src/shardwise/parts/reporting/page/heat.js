// The heat maps: one for each stage, with a cell for each rank.

const NOT_RUN = 65, GONE = 66; // after the 65 colours

class HeatMaps {
  constructor(onChoose) {
    this.onChoose = onChoose;
    $("#arrange").addEventListener("change", () => this.draw());
    $("#colour").addEventListener("change", () => this.draw());
  }

  show(operation) {
    this.operation = operation;
    this.whole = extremes(operation);
    const choices = [["host", "host"]];
    if (operation.axes.length) choices.unshift(["axes", axesText(operation.axes, operation.coordinates)]);
    const select = $("#arrange"), before = select.value;
    select.replaceChildren(...choices.map(([value, text]) => make("option", { value }, text)));
    select.value = choices.some(([value]) => value === before) ? before : choices[0][0];
    const maps = operation.stages.map((stage, s) => this.map(stage, s));
    $("#maps").replaceChildren(...maps.map((each) => each.element));
    this.maps = maps;
    this.draw();
  }

  /** Return the elements of a stage's map. */
  map(stage, s) {
    const slowest = stage.own.reduce((best, value, i) => (value > (stage.own[best] ?? -1) ? i : best), 0);
    const figures = `${formatSeconds(stage.median)} · max ${formatSeconds(stage.own[slowest])}`;
    const canvas = make("canvas", { tabindex: 0, role: "application" });
    canvas.setAttribute("aria-label", `${stage.name}: median ${formatSeconds(stage.median)}, longest ${formatSeconds(stage.own[slowest])} on rank ${this.operation.rank[slowest]}`);
    const cursor = make("div", { class: "cursor", hidden: "" });
    const title = make("h3", {}, make("span", { title: stage.name }, stage.name), make("small", { title: "median and maximum, without waiting" }, figures));
    const element = make("div", { class: "map" }, title, make("div", { class: "field" }, canvas, cursor));
    if (stage.slow) element.append(make("p", { class: "slow" }, stage.slow));
    canvas.addEventListener("pointermove", (event) => this.point(event, s));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("blur", () => this.leave());
    canvas.addEventListener("click", (event) => { const i = this.at(event, s); if (i >= 0) this.onChoose(i); });
    canvas.addEventListener("keydown", (event) => this.press(event, s));
    return { element, canvas, cursor };
  }

  draw() {
    const { operation } = this;
    const byHost = $("#arrange").value === "host";
    this.layout = byHost ? arrangeByHost(operation.host) : arrangeByAxes(operation.coordinates, operation.n);
    const { width, height, x, y } = this.layout;
    this.cells = new Int32Array(width * height).fill(-1);
    for (let i = 0; i < operation.n; i++) if (x[i] >= 0) this.cells[y[i] * width + x[i]] = i;
    const dots = devicePixelRatio || 1, room = $("#maps").clientWidth;
    const most = room < 500 ? room / 2 - 10 : width > 24 ? 330 : 220; // two in a row on phones
    const wished = Math.floor((most * dots) / width);
    this.size = Math.max(1, Math.min(26 * dots, wished)); // of a cell, in pixels of the screen
    $("#maps").style.setProperty("--map", `${Math.max(Math.min(200, most), (width * this.size) / dots)}px`);
    this.colours = heatColours();
    this.missing = css(colour("missing"));
    const needsBytes = ["rate", "bytes"].includes($("#colour").value);
    this.maps.forEach((map, s) => {
      map.element.hidden = needsBytes && !largest(operation.stages[s].bytes, 0);
      this.paint(map, operation.stages[s]);
    });
    this.explain();
    this.leave();
  }

  /** Paint the cells of a stage. */
  paint(map, stage) {
    const { width, height } = this.layout, heat = HEAT[$("#colour").value];
    const dots = devicePixelRatio || 1, { size } = this;
    const context = prepare(map.canvas, (width * size) / dots, (height * size) / dots);
    context.setTransform(1, 0, 0, 1, 0, 0);
    const inner = size - (size >= 12 ? 2 : size >= 4 ? 1 : 0);
    // The cells of each colour, because changing the colour is slow: 0 … 64, then those without one.
    const painted = Array.from({ length: GONE + 1 }, () => []);
    const byHost = $("#arrange").value === "host";
    for (let cell = 0; cell < this.cells.length; cell++) {
      const i = this.cells[cell];
      if (i < 0 && (byHost || this.isGap(cell))) continue;
      if (i < 0 || !this.operation.present[i]) { painted[GONE].push(cell); continue; }
      const t = heat(stage, i, this.whole);
      painted[t === t ? Math.round(Math.max(0, Math.min(1, t)) * 64) : NOT_RUN].push(cell);
    }
    painted.forEach((cells, key) => {
      context.fillStyle = context.strokeStyle = key > 64 ? this.missing : this.colours[key];
      const grown = size < 5 && key > 24 && key <= 64 ? 5 : inner; // so that one of thousands is seen
      for (const cell of cells) {
        const left = (cell % width) * size, top = Math.floor(cell / width) * size;
        if (key === GONE) hatch(context, left, top, inner);
        else if (key === NOT_RUN) context.fillRect(left + inner * 0.4, top + inner * 0.4, Math.max(1, inner * 0.2), Math.max(1, inner * 0.2));
        else context.fillRect(left - (grown - inner) / 2, top - (grown - inner) / 2, grown, grown);
      }
    });
    map.size = size / dots;
    map.inner = inner / dots;
  }

  /** Whether a cell without a rank is between two groups, and not the place of a missing rank. */
  isGap(cell) {
    const { width } = this.layout, row = Math.floor(cell / width);
    for (let k = row * width; k < (row + 1) * width; k++) if (this.cells[k] >= 0) return false;
    return true;
  }

  explain() {
    const texts = { ratio: ["median", "4 × the median"], seconds: ["0 s", formatSeconds(this.whole.longest)], waited: ["0 s", formatSeconds(this.whole.waited)],
      rate: ["fastest rank", "0 B/s"], bytes: ["0 B", formatBytes(this.whole.bytes)], retries: ["0", formatCount(Math.round(this.whole.retries))] };
    const [low, high] = texts[$("#colour").value];
    const legend = [make("span", {}, low, make("i", { class: "ramp" }), high)];
    if (this.operation.present.some((each) => !each)) legend.push(make("span", {}, make("i", { class: "hatched" }), "no telemetry"));
    $("#heat-legend").replaceChildren(...legend);
  }

  at(event, s) {
    const { size } = this.maps[s], { width, height } = this.layout;
    const [x, y] = [Math.floor(event.offsetX / size), Math.floor(event.offsetY / size)];
    return x >= 0 && y >= 0 && x < width && y < height ? this.cells[y * width + x] : -1;
  }

  point(event, s) {
    const i = this.at(event, s);
    if (i < 0) return this.leave();
    this.mark(i);
    showRank(this.operation, i, event.clientX, event.clientY, s);
  }

  /** Mark a rank in all maps. */
  mark(i) {
    this.marked = i;
    for (const { cursor, size, inner } of this.maps) {
      cursor.hidden = false;
      const around = Math.max(inner, 5) + 4;
      cursor.style.left = `${this.layout.x[i] * size + inner / 2 - around / 2}px`;
      cursor.style.top = `${this.layout.y[i] * size + inner / 2 - around / 2}px`;
      cursor.style.width = cursor.style.height = `${around}px`;
    }
  }

  leave() {
    for (const { cursor } of this.maps) cursor.hidden = true;
    hideHint();
  }

  press(event, s) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const { width, height, x, y } = this.layout, { operation } = this;
    if (event.key === "Enter" && this.marked !== undefined) this.onChoose(this.marked);
    if (!moves[event.key]) return;
    event.preventDefault();
    const [dx, dy] = moves[event.key];
    let i = this.marked ?? this.cells.find((each) => each >= 0);
    for (let u = x[i] + dx, v = y[i] + dy; u >= 0 && v >= 0 && u < width && v < height; u += dx, v += dy) {
      if (this.cells[v * width + u] >= 0) { i = this.cells[v * width + u]; break; }
    }
    this.mark(i);
    const stage = operation.stages[s], box = this.maps[s].cursor.getBoundingClientRect();
    showRank(operation, i, box.right, box.bottom, s);
    speak(`${rankName(operation, i)}: ${stage.name} ${operation.present[i] ? stageText(stage, i) : "no telemetry"}`);
  }
}

/** Draw the cell of a rank without a record. */
function hatch(context, left, top, size) {
  if (size < 4) return context.fillRect(left, top, Math.max(1, size / 2), Math.max(1, size / 2));
  context.strokeRect(left + 0.5, top + 0.5, size - 1, size - 1);
  context.beginPath();
  for (let k = 4; k < 2 * size; k += 5) {
    context.moveTo(left + Math.max(0, k - size), top + Math.min(k, size));
    context.lineTo(left + Math.min(k, size), top + Math.max(0, k - size));
  }
  context.stroke();
}
