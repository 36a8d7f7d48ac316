// The map of a tensor's boxes, in the colours of the ranks or files that hold them.

class TensorMap {
  constructor() {
    this.canvas = $("#tensor-canvas");
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", hideHint);
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("blur", hideHint);
  }

  async show(document) {
    const packed = await unpack(document.packed), d = document.shape.length;
    const corners = document.corners.map((each) => exactColumn(packed, each));
    Object.assign(this, { tensor: document, offset: corners.slice(0, d), size: corners.slice(d), owner: exactColumn(packed, document.owner), at: -1 });
    [this.down, this.across] = d > 1 ? mappedDimensions(document.shape, this.offset) : [undefined, d ? 0 : undefined];
    const some = document.shown < document.boxes ? ` (${formatCount(document.shown)} of them are shown)` : "";
    const directions = d > 2 ? `; dimension ${this.down} runs down, dimension ${this.across} to the right` : "";
    $("#tensor-about").textContent = `${document.dtype} [${document.shape.join(", ")}], ${formatBytes(document.bytes)} in ${formatCount(document.boxes)} ${document.boxes === 1 ? "box" : "boxes"}${some} of ${formatCount(document.count)} ${document.kind}${document.count === 1 ? "" : "s"}${directions}`;
    this.list();
    this.draw();
  }

  file(k) { return this.tensor.files[this.owner[k]] ?? ""; }
  name(k) {
    const { kind, owners } = this.tensor, number = owners[this.owner[k]];
    return kind === "file" && this.file(k) ? this.file(k) : `${kind} ${number ?? "?"}`;
  }
  box(k) { return `[${this.offset.map((each, d) => `${each[k]}:${each[k] + this.size[d][k]}`).join(", ")}]`; }

  list() {
    const shown = Math.min(100, this.owner.length), rows = [];
    for (let k = 0; k < shown; k++) rows.push(make("tr", {}, make("td", {}, this.name(k)), make("td", {}, make("code", {}, this.box(k)))));
    if (shown < this.owner.length) rows.push(make("tr", {}, make("td", { colspan: 2 }, `… and ${formatCount(this.owner.length - shown)} more`)));
    $("#box-table thead").replaceChildren(make("tr", {}, make("th", { scope: "col" }, "held by"), make("th", { scope: "col" }, "box")));
    $("#box-table tbody").replaceChildren(...rows);
  }

  /** Return the rectangle of a box on the canvas. */
  rectangle(k) {
    const side = (d, length) => (d === undefined ? [0, length] : [this.offset[d][k], this.size[d][k]].map((v) => (v / Math.max(1, this.tensor.shape[d])) * length));
    const [x, w] = side(this.across, this.width), [y, h] = side(this.down, this.height);
    return [x, y, w, h];
  }

  draw() {
    if (!this.tensor) return;
    this.width = this.canvas.parentElement.clientWidth;
    const { shape } = this.tensor;
    const aspect = this.down === undefined ? 0 : shape[this.down] / Math.max(1, shape[this.across]);
    this.height = this.down === undefined ? 72 : Math.max(160, Math.min(380, this.width * aspect));
    const context = prepare(this.canvas, this.width, this.height);
    const dark = colour("panel")[0] < 90, line = css(colour("panel")), [text] = [css(colour("text"))];
    context.font = "12px system-ui, sans-serif";
    for (let k = 0; k < this.owner.length; k++) {
      const [x, y, w, h] = this.rectangle(k);
      context.fillStyle = `hsl(${(this.owner[k] * 137.508 + 185) % 360} ${dark ? "42% 40%" : "48% 74%"})`;
      context.fillRect(x, y, Math.max(w, 0.5), Math.max(h, 0.5));
      if (w > 3 && h > 3) { context.strokeStyle = line; context.strokeRect(x, y, w, h); }
      const name = this.name(k);
      if (h > 15 && w > 7 * name.length + 8) { context.fillStyle = text; context.fillText(name, x + 6, y + 15); }
    }
    if (this.at >= 0) { context.strokeStyle = text; context.lineWidth = 2; context.strokeRect(...this.rectangle(this.at)); }
  }

  hint(k, x, y) { showHint(x, y, this.name(k), [["box", this.box(k)], ["file", this.file(k)]]); }

  point(event) {
    for (let k = 0; k < this.owner.length; k++) {
      const [x, y, w, h] = this.rectangle(k);
      if (event.offsetX >= x && event.offsetX < x + w && event.offsetY >= y && event.offsetY < y + h) return this.hint(k, event.clientX, event.clientY);
    }
    hideHint();
  }

  press(event) {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.at = Math.max(0, Math.min(this.owner.length - 1, this.at + step));
    this.draw();
    const [x, y] = this.rectangle(this.at), frame = this.canvas.getBoundingClientRect();
    this.hint(this.at, frame.left + x, frame.top + y);
    speak(`${this.name(this.at)} holds ${this.box(this.at)}`);
  }
}
