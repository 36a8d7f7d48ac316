// The table of ranks, which has all numbers of the heat maps as text.

const ROWS = 20;

class RankTable {
  constructor(onChoose) {
    this.onChoose = onChoose;
    for (const selector of ["#filter", "#column"]) $(selector).addEventListener("input", () => { this.page = 0; this.draw(); });
    $("#previous").addEventListener("click", () => { this.page--; this.draw(); });
    $("#next").addEventListener("click", () => { this.page++; this.draw(); });
  }

  show(operation) {
    Object.assign(this, { operation, whole: extremes(operation), page: 0, by: "lost", falling: true });
    this.draw();
  }

  /** The number of a rank in a column of the table, by which it is sorted. */
  value(key, i) {
    const { operation } = this;
    if (key === "rank" || key === "host" || key === "lost") return operation[key][i];
    const stage = operation.stages[key], how = $("#column").value;
    return how === "rate" ? stage.bytes[i] / stage.own[i] || NaN : stage[how][i];
  }

  rows() {
    const { operation } = this, wanted = $("#filter").value.trim().toLowerCase().replace(/^rank\s*/, "");
    const isNumber = /^\d+$/.test(wanted);
    const rows = Array.from({ length: operation.n }, (_, i) => i).filter((i) =>
      !wanted || (isNumber && String(operation.rank[i]) === wanted) || (operation.hosts[operation.host[i]] ?? "").toLowerCase().includes(wanted));
    const sign = this.falling ? -1 : 1, keys = new Float64Array(operation.n).fill(-Infinity);
    for (const i of rows) { const value = this.value(this.by, i); if (value === value) keys[i] = value; }
    return rows.sort((a, b) => sign * (keys[a] - keys[b] || 0) || a - b);
  }

  draw() {
    const { operation } = this, rows = this.rows(), pages = Math.max(1, Math.ceil(rows.length / ROWS));
    this.page = Math.max(0, Math.min(this.page, pages - 1));
    const columns = [["rank", "rank"], ["host", "host"], ...operation.stages.map((stage, s) => [s, stage.name]), ["lost", "above median"]];
    $("#rank-table thead").replaceChildren(make("tr", {}, ...columns.map((each) => this.heading(...each))));
    this.colours = heatColours();
    const shown = rows.slice(this.page * ROWS, (this.page + 1) * ROWS);
    $("#rank-table tbody").replaceChildren(...shown.map((i) => this.row(i)));
    $("#page-of").textContent = `${formatCount(rows.length ? this.page * ROWS + 1 : 0)}–${formatCount(this.page * ROWS + shown.length)} of ${formatCount(rows.length)}`;
    $("#previous").disabled = this.page === 0;
    $("#next").disabled = this.page === pages - 1;
  }

  heading(key, name) {
    const button = make("button", { type: "button" }, name + (this.by === key ? (this.falling ? " ↓" : " ↑") : ""));
    button.addEventListener("click", () => {
      this.falling = this.by === key ? !this.falling : typeof key !== "string" || key === "lost";
      Object.assign(this, { by: key, page: 0 });
      this.draw();
    });
    const sort = this.by === key ? { "aria-sort": this.falling ? "descending" : "ascending" } : {};
    return make("th", { scope: "col", class: key === "host" ? "" : "num", ...sort }, button);
  }

  row(i) {
    const { operation } = this, how = $("#column").value, gone = !operation.present[i];
    const rank = make("a", { href: "#timeline" }, formatCount(operation.rank[i]));
    rank.addEventListener("click", () => this.onChoose(i));
    const cells = operation.stages.map((stage, s) => {
      const value = this.value(s, i);
      const text = { own: formatSeconds, waited: formatSeconds, rate: (v) => (v > 0 ? `${formatBytes(v)}/s` : "–"), retries: (v) => (v >= 0 ? String(v) : "–") }[how](value);
      const cell = make("td", { class: "num cell" }, text);
      const heat = HEAT[how === "own" ? "ratio" : how](stage, i, this.whole);
      if (heat > 0.04 && !gone) {
        const back = this.colours[Math.round(Math.min(1, heat) * 64)];
        Object.assign(cell.style, { background: back, color: inkOn(back) });
      }
      return cell;
    });
    const host = operation.hosts[operation.host[i]] ?? "–";
    return make("tr", gone ? { class: "gone" } : {}, make("td", { class: "num" }, rank), make("td", {}, host), ...cells, make("td", { class: "num" }, gone ? "no telemetry" : `+${formatSeconds(operation.lost[i])}`));
  }
}
