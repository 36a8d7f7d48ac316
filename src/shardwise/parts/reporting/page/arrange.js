// Where the cells of a heat map are: functions over values, without a document.

/** Arrange ranks by host. Each host is a block of cells, and blocks fill a rectangle. */
function arrangeByHost(host, aspect = 1) {
  const members = new Map();
  host.forEach((at, i) => members.get(at)?.push(i) ?? members.set(at, [i]));
  const size = largest([...members.values()].map((each) => each.length));
  const wide = Math.min(size, size > 16 ? Math.ceil(Math.sqrt(size)) : 8);
  const high = Math.ceil(size / wide);
  const gap = members.size > 1 ? 1 : 0, below = high > 1 ? gap : 0;
  const shape = (across) => [across * (wide + gap) - gap, Math.ceil(members.size / across) * (high + below) - below];
  const cost = (across) => { const [w, h] = shape(across); return Math.abs(Math.log(w / h / aspect)); };
  let across = 1;
  for (let k = 2; k <= members.size; k++) if (cost(k) < cost(across)) across = k;
  const [width, height] = shape(across);
  const x = new Int32Array(host.length), y = new Int32Array(host.length);
  const down = Math.ceil(members.size / across); // hosts are numbered down the columns
  [...members.values()].forEach((ranks, block) => {
    const left = Math.floor(block / down) * (wide + gap), top = (block % down) * (high + below);
    ranks.forEach((i, k) => { x[i] = left + (k % wide); y[i] = top + Math.floor(k / wide); });
  });
  return { width, height, x, y };
}

/**
 * Arrange ranks by their coordinates. The largest axis runs to the right, the others down, with a
 * gap between the coordinates of the outermost one. A rank without coordinates gets no cell (-1).
 */
function arrangeByAxes(coordinates, n) {
  const sizes = coordinates.map((each) => largest(each) + 1);
  const across = sizes.lastIndexOf(Math.max(...sizes));
  const down = sizes.map((_, a) => a).filter((a) => a !== across && sizes[a] > 1);
  const rows = down.reduce((product, a) => product * sizes[a], 1);
  const inner = down.length > 1 ? rows / sizes[down[0]] : 0;
  const seen = new Map(), x = new Int32Array(n).fill(-1), y = new Int32Array(n).fill(-1), layer = new Int32Array(n);
  let layers = 1; // several ranks have the same coordinates if the mesh lacks an axis
  for (let i = 0; i < n; i++) {
    if (coordinates.some((each) => each[i] < 0)) continue;
    x[i] = coordinates[across][i];
    y[i] = down.reduce((row, a) => row * sizes[a] + coordinates[a][i], 0);
    const key = x[i] * rows + y[i];
    layer[i] = seen.get(key) ?? 0;
    seen.set(key, layer[i] + 1);
    layers = Math.max(layers, layer[i] + 1);
  }
  // One long row is broken into a square.
  const wrap = rows * layers === 1 && sizes[across] > 64 ? Math.ceil(Math.sqrt(sizes[across])) : sizes[across];
  for (let i = 0; i < n; i++) {
    if (x[i] < 0) continue;
    y[i] = y[i] * layers + layer[i] + (inner ? Math.floor(y[i] / inner) : 0) + Math.floor(x[i] / wrap);
    x[i] %= wrap;
  }
  const gaps = inner ? sizes[down[0]] - 1 : 0;
  return { width: wrap, height: rows * layers + gaps + Math.ceil(sizes[across] / wrap) - 1, x, y };
}

/** Return which axis runs to the right and which run down, as a text. */
function axesText(axes, coordinates) {
  const sizes = coordinates.map((each) => largest(each) + 1);
  const across = sizes.lastIndexOf(Math.max(...sizes));
  const down = axes.filter((_, a) => a !== across && sizes[a] > 1);
  return `${axes[across]} →` + (down.length ? `, ${down.join(", ")} ↓` : "");
}

/** How hot a rank is in a stage, from 0 to 1; NaN if it has not run the stage. */
const HEAT = {
  // Doubles until four times the median; what costs less than 5 % of the operation, or 50 ms, stays pale.
  ratio: (stage, i, whole) => {
    const excess = stage.own[i] - stage.median;
    if (!(excess > 0)) return stage.own[i] - stage.own[i];
    const ratio = Math.log2(stage.own[i] / Math.max(stage.median, 1e-6)) / 2;
    return Math.min(1, ratio) * Math.min(1, excess / Math.max(0.05 * whole.seconds, 0.05));
  },
  seconds: (stage, i, whole) => stage.own[i] / whole.longest,
  waited: (stage, i, whole) => stage.waited[i] / whole.waited,
  rate: (stage, i, whole) => (stage.bytes[i] > 0 ? 1 - stage.bytes[i] / stage.own[i] / stage.best : NaN),
  bytes: (stage, i, whole) => stage.bytes[i] / whole.bytes,
  retries: (stage, i, whole) => stage.retries[i] / whole.retries,
};

/** Return the largest numbers of an operation, which are the ends of the colours. */
function extremes(operation) {
  const most = (name) => largest(operation.stages.map((stage) => largest(stage[name], 0)), 1e-9);
  for (const stage of operation.stages) {
    stage.best = stage.bytes.reduce((best, bytes, i) => Math.max(best, bytes / stage.own[i] || 0), 1e-9);
  }
  return { seconds: operation.seconds, longest: most("own"), waited: most("waited"), bytes: most("bytes"), retries: most("retries") };
}

/** Return round numbers from 0 that divide a range into about `count` parts. */
function ticks(from, to, count) {
  const rough = (to - from) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
  const found = [];
  for (let k = Math.ceil(from / step); k * step <= to; k++) found.push(k * step);
  return found;
}

/** Return the two dimensions of a tensor that have the most cuts, in order. */
function mappedDimensions(shape, offsets) {
  const cuts = offsets.map((each) => new Set(each).size);
  const order = shape.map((_, d) => d).sort((a, b) => cuts[b] - cuts[a] || (shape[b] > 1) - (shape[a] > 1) || a - b);
  return order.slice(0, 2).sort((a, b) => a - b);
}
