// The timeline: a row for each rank, with a bar for each stage.

const GUTTER = 92, AXIS = 22, ROW = 20; // CSS pixels

class Timeline {
  constructor() {
    this.canvas = $("#timeline-canvas");
    this.canvas.addEventListener("pointerdown", (event) => this.grab(event));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerup", () => { this.held = null; });
    this.canvas.addEventListener("pointerleave", () => { hideHint(); this.over = -1; this.draw(); });
    this.canvas.addEventListener("dblclick", (event) => this.zoom(0.4, event.offsetX, event.offsetY));
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    $("#closer").addEventListener("click", () => this.zoom(0.5));
    $("#wider").addEventListener("click", () => this.zoom(2));
    $("#whole").addEventListener("click", () => this.whole());
    $("#order").addEventListener("change", () => { this.sort(); this.whole(); });
    $("#straggler").addEventListener("click", () => this.nextStraggler());
    $("#search").addEventListener("submit", (event) => { event.preventDefault(); this.find(event.target.text.value.trim()); });
  }

  show(operation) {
    this.operation = operation;
    this.chosen = this.over = -1;
    this.jump = -1;
    const row = new Map([...operation.rank].map((rank, i) => [rank, i]));
    this.jumps = operation.jumps.map(([stage, rank]) => [stage, row.get(rank)]).filter((each) => each[1] !== undefined);
    this.slow = new Set(this.jumps.map((each) => each[1]));
    $("#straggler").disabled = !this.jumps.length;
    $("#stage-legend").replaceChildren(...operation.stages.map((stage, s) => make("span", {}, make("i", { class: `c${s % 10}` }), stage.name)));
    $("#hosts").replaceChildren(...operation.hosts.slice(0, 500).map((host) => make("option", { value: host })));
    this.sort();
    this.whole();
  }

  sort() {
    const { n, lost, host } = this.operation, how = $("#order").value;
    const order = Array.from({ length: n }, (_, i) => i);
    if (how === "lost") order.sort((a, b) => lost[b] - lost[a]);
    if (how === "host") order.sort((a, b) => host[a] - host[b] || a - b);
    this.order = order;
    this.rowOf = new Int32Array(n);
    order.forEach((i, row) => { this.rowOf[i] = row; });
  }

  /** Show all ranks and the whole time. */
  whole() {
    Object.assign(this, { top: 0, rows: this.operation.n, from: 0, to: largest(this.operation.end, Math.max(this.operation.seconds, 1e-6)) * 1.01 });
    this.draw();
  }

  get height() { return Math.min(460, Math.max(120, this.operation.n * ROW + AXIS)); }
  get across() { return this.canvas.parentElement.clientWidth - GUTTER; }
  get down() { return this.height - AXIS; }

  draw() {
    const { operation } = this;
    if (!operation) return;
    const context = (this.context = prepare(this.canvas, GUTTER + this.across, this.height));
    const [text, quiet, line] = ["text", "quiet", "line"].map((name) => css(colour(name)));
    this.colours = operation.stages.map((_, s) => colour(`c${s % 10}`));
    this.faded = this.colours.map((each) => css(each, 0.28));
    this.solid = this.colours.map((each) => css(each));
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = quiet;
    context.strokeStyle = line;
    for (const at of ticks(this.from, this.to, Math.max(2, this.across / 110))) {
      const x = Math.round(this.x(at)) + 0.5;
      context.beginPath();
      context.moveTo(x, AXIS);
      context.lineTo(x, this.height);
      context.stroke();
      const shown = at === 0 ? "0 s" : this.to - this.from < 0.5 ? `${+(at * 1000).toFixed(2)} ms` : `${+at.toFixed(3)} s`;
      context.fillText(shown, x + 3, AXIS / 2);
    }
    context.save();
    context.rect(0, AXIS, GUTTER + this.across, this.down);
    context.clip();
    if (this.rows >= this.down) this.drawLines(context);
    else this.drawRows(context, text, quiet);
    context.restore();
    this.drawPosition(context, line, quiet);
  }

  x(seconds) { return GUTTER + ((seconds - this.from) / (this.to - this.from)) * this.across; }

  /** Draw one line of pixels for several ranks: the one of them that lost most time. */
  drawLines(context) {
    const { lost } = this.operation, step = this.rows / this.down, marked = [];
    for (let pixel = 0; pixel < this.down; pixel++) {
      const low = Math.floor(this.top + pixel * step), high = Math.max(low + 1, Math.floor(this.top + (pixel + 1) * step));
      let worst = this.order[low];
      for (let row = low; row < high && row < this.order.length; row++) {
        const i = this.order[row];
        if (lost[i] > lost[worst]) worst = i;
        if (this.slow.has(i)) marked.push([i, AXIS + pixel - 1]);
      }
      if (worst !== undefined) this.bars(context, worst, AXIS + pixel, 1);
    }
    for (const [i, y] of marked) { // over the others, and thicker
      this.bars(context, i, y, 3);
      this.mark(context, y, 3);
    }
  }

  drawRows(context, text, quiet) {
    const size = this.down / this.rows, pad = size > 8 ? 2 : size > 3 ? 0.5 : 0;
    const every = Math.max(1, Math.ceil(15 / size));
    for (let row = Math.floor(this.top); row < Math.min(this.order.length, this.top + this.rows); row++) {
      const i = this.order[row], y = AXIS + (row - this.top) * size;
      if (y + size < AXIS) continue;
      if (i === this.chosen || i === this.over) {
        context.fillStyle = css(colour("accent"), i === this.chosen ? 0.22 : 0.1);
        context.fillRect(0, y, GUTTER + this.across, size);
      }
      this.bars(context, i, y + pad, Math.max(1, size - 2 * pad), size >= 15);
      if (this.slow.has(i)) this.mark(context, y, size);
      if (row % every === 0 || i === this.chosen) {
        context.fillStyle = this.slow.has(i) || i === this.chosen ? text : quiet;
        context.textAlign = "right";
        context.fillText(`rank ${this.operation.rank[i]}`, GUTTER - 14, y + size / 2);
        context.textAlign = "left";
      }
    }
  }

  /** Mark the row of a straggler. */
  mark(context, y, size) {
    context.fillStyle = css(colour("heat3"));
    context.fillRect(GUTTER - 9, y, 4, size);
  }

  /** Draw the bars of a rank; what it waited is at the end of a bar, and pale. */
  bars(context, i, y, height, named = false) {
    if (!this.operation.present[i]) {
      context.fillStyle = css(colour("missing"), 0.35);
      context.fillRect(GUTTER, y + height / 2 - 0.5, this.across, 1);
      if (named) context.fillText("no telemetry", GUTTER + 6, y + height / 2);
      return;
    }
    this.operation.stages.forEach((stage, s) => {
      if (!(stage.start[i] >= 0)) return;
      const [a, b, c] = [stage.start[i], stage.start[i] + stage.own[i], stage.start[i] + stage.duration[i]].map((t) => Math.max(GUTTER, Math.min(GUTTER + this.across, this.x(t))));
      if (c <= GUTTER || a >= GUTTER + this.across) return;
      context.fillStyle = this.faded[s];
      context.fillRect(a, y, c - a, height);
      context.fillStyle = this.solid[s];
      context.fillRect(a, y, Math.max(b - a, 0.5), height);
      if (named && b - a > 7 * stage.name.length + 8) {
        context.fillStyle = css(colour("panel"));
        context.fillText(stage.name, a + 5, y + height / 2 + 0.5);
      }
    });
  }

  /** Show on the right which part of the ranks is visible. */
  drawPosition(context, line, quiet) {
    if (this.rows >= this.order.length) return;
    const right = GUTTER + this.across - 5;
    context.fillStyle = line;
    context.fillRect(right, AXIS, 5, this.down);
    context.fillStyle = quiet;
    context.fillRect(right, AXIS + (this.top / this.order.length) * this.down, 5, Math.max(6, (this.rows / this.order.length) * this.down));
  }

  /** Zoom about a point of the canvas; about the middle without one. */
  zoom(factor, x = GUTTER + this.across / 2, y = AXIS + this.down / 2) {
    const [u, v] = [Math.max(0, (x - GUTTER) / this.across), Math.max(0, (y - AXIS) / this.down)];
    const span = (this.to - this.from) * factor, rows = this.rows * factor;
    this.place(this.from + (this.to - this.from - span) * u, span, this.top + (this.rows - rows) * v, rows);
  }

  /** Show a range of time and of rows, within what exists. */
  place(from, span, top, rows) {
    const { n, seconds } = this.operation, longest = seconds * 1.01;
    span = Math.max(1e-5, Math.min(span, longest));
    rows = Math.max(Math.min(n, this.down / 40), Math.min(rows, n));
    this.from = Math.max(0, Math.min(from, longest - span));
    this.to = this.from + span;
    this.top = Math.max(0, Math.min(top, n - rows));
    this.rows = rows;
    this.draw();
  }

  /** Move to a rank, at a zoom that shows its bars with their names. */
  choose(i) {
    this.chosen = i;
    const rows = Math.min(this.rows, this.down / ROW);
    this.place(this.from, this.to - this.from, this.rowOf[i] + 0.5 - rows / 2, rows);
    speak(rankName(this.operation, i));
  }

  nextStraggler() {
    this.jump = (this.jump + 1) % this.jumps.length;
    const [stage, i] = this.jumps[this.jump];
    this.choose(i);
    speak(`${rankName(this.operation, i)} was slow in ${stage}`);
  }

  find(text) {
    const { operation } = this, host = operation.hosts.indexOf(text);
    const i = host >= 0 ? operation.host.indexOf(host) : operation.rank.indexOf(Number(text.replace(/^rank\s*/i, "") || NaN));
    if (i >= 0) this.choose(i);
    else speak(`no rank or host ${text}`);
    $("#search input").setCustomValidity(i >= 0 ? "" : "There is no such rank or host");
    $("#search input").reportValidity();
    $("#search input").setCustomValidity("");
  }

  grab(event) {
    this.held = { x: event.offsetX, y: event.offsetY, from: this.from, top: this.top };
    if (event.pointerType === "mouse") this.canvas.setPointerCapture(event.pointerId);
  }

  point(event) {
    if (this.held) {
      hideHint();
      const time = ((this.held.x - event.offsetX) / this.across) * (this.to - this.from);
      const rows = ((this.held.y - event.offsetY) / this.down) * this.rows;
      return this.place(this.held.from + time, this.to - this.from, this.held.top + rows, this.rows);
    }
    const row = Math.floor(this.top + ((event.offsetY - AXIS) / this.down) * this.rows);
    const i = event.offsetY < AXIS ? undefined : this.order[row];
    if (i !== this.over) { this.over = i; this.draw(); }
    if (i === undefined) return hideHint();
    const time = this.from + ((event.offsetX - GUTTER) / this.across) * (this.to - this.from);
    const here = this.operation.stages.findIndex((stage) => stage.start[i] <= time && time <= stage.start[i] + stage.duration[i]);
    showRank(this.operation, i, event.clientX, event.clientY, here);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.zoom(1.0015 ** event.deltaY, event.offsetX, event.offsetY);
  }

  press(event) {
    const span = this.to - this.from;
    const moves = { ArrowLeft: [-0.15, 0], ArrowRight: [0.15, 0], ArrowUp: [0, -0.15], ArrowDown: [0, 0.15] };
    if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "Home") this.whole();
    else if (moves[event.key]) this.place(this.from + moves[event.key][0] * span, span, this.top + moves[event.key][1] * this.rows, this.rows);
    else return;
    event.preventDefault();
  }
}
