"use strict";
// Decodes the columns of columns.py, and formats numbers as words.py does.

const NONE = 65535; // a number that does not exist

/** Return the 16-bit numbers in base64 of gzip. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint16Array(await new Response(stream).arrayBuffer());
}

/** Return a column; NaN for numbers that do not exist. */
function column(packed, [at, length, scale, first]) {
  const out = new Float64Array(length);
  if (at === null) return out.fill(first === NONE ? NaN : first * scale);
  for (let i = 0; i < length; i++) {
    const value = packed[at + i];
    out[i] = value === NONE ? NaN : value * scale;
  }
  return out;
}

/** Return a column of exact integers, of which the halves are stored; -1 if one does not exist. */
function exactColumn(packed, [low, high]) {
  const half = ([at, , , first], i) => (at === null ? first : packed[at + i]);
  return Float64Array.from({ length: low[1] }, (_, i) => {
    const value = half(low, i) + half(high, i) * 65536;
    return value === 4294967295 ? -1 : value;
  });
}

/** Return an operation with its columns decoded. Times are in seconds. */
async function decodeOperation(document) {
  const packed = await unpack(document.packed);
  const rank = exactColumn(packed, document.rank);
  const stages = document.stages.map((stage) => {
    const of = (name, unit) => column(packed, stage[name]).map((value) => value / unit);
    const [start, duration, waited] = ["start", "duration", "waited"].map((name) => of(name, 1e6));
    const own = duration.map((value, i) => Math.max(0, value - waited[i]));
    return { name: stage.name, slow: stage.slow, start, duration, waited, own, median: lowerMedian(own), bytes: of("bytes", 1), retries: of("retries", 1) };
  });
  // What a rank needed longer than the median, over all stages.
  const lost = rank.map((_, i) => stages.reduce((sum, s) => sum + Math.max(0, s.own[i] - s.median || 0), 0));
  const end = rank.map((_, i) => Math.max(...stages.map((s) => (s.start[i] >= 0 ? s.start[i] + s.duration[i] : -1))));
  return {
    ...document, stages, rank, end, lost, n: rank.length,
    present: column(packed, document.present),
    host: exactColumn(packed, document.host),
    coordinates: document.coordinates.map((each) => exactColumn(packed, each)),
  };
}

/** Return the largest number; a call of Math.max cannot have more than about 100,000 arguments. */
const largest = (values, least = -Infinity) => values.reduce((most, value) => (value > most ? value : most), least);

/** Return the median of the numbers that exist; the smaller one of two. */
function lowerMedian(values) {
  const known = values.filter((value) => value === value).sort();
  return known.length ? known[(known.length - 1) >> 1] : NaN;
}

function formatSeconds(seconds) {
  if (!(seconds >= 0)) return "–";
  if (seconds < 0.5e-6) return "0 s";
  if (seconds < 0.9995e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 0.0995) return `${(seconds * 1e3).toFixed(0)} ms`;
  if (seconds < 119.5) return `${seconds.toFixed(seconds < 9.995 ? 2 : seconds < 99.95 ? 1 : 0)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  if (minutes >= 120) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return whole % 60 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
}

function formatBytes(bytes) {
  if (!(bytes >= 0)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let at = 0;
  while (bytes >= 1000 && at < units.length - 1) { bytes /= 1024; at++; }
  return `${at === 0 ? bytes.toFixed(0) : bytes.toFixed(bytes < 10 ? 2 : bytes < 100 ? 1 : 0)} ${units[at]}`;
}

/** Return black or white, whichever is easier to read on a colour `rgb(red green blue)`. */
function inkOn(back) {
  const [red, green, blue] = back.match(/\d+/g).map((value) => (value / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#000" : "#fff";
}

const formatCount = (number) => number.toLocaleString("en-US");

/** Return what identifies a rank: `rank 12 · node-1 · pp 2 · tp 1`. */
function rankName(operation, i) {
  const host = operation.hosts[operation.host[i]];
  const place = operation.axes.map((axis, a) => [axis, operation.coordinates[a][i]]).filter((each) => each[1] >= 0);
  return [`rank ${operation.rank[i]}`, ...(host === undefined ? [] : [host]), ...place.map((each) => each.join(" "))].join(" · ");
}
