// The embedded numbers, decoded; nothing here touches the page.

function bytes(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

// Rows of 16-bit integers, each row with a scale of its own, as a Float32Array.
function unpack(packed) {
  if (packed.values) return packed.values;
  const whole = new Int16Array(bytes(packed.data).buffer);
  const scale = new Float32Array(bytes(packed.scale).buffer);
  const out = new Float32Array(whole.length), columns = packed.columns;
  for (let i = 0; i < whole.length; i++) out[i] = whole[i] * scale[(i / columns) | 0];
  packed.values = out;
  return out;
}

const LUT = {};
for (const name in DATA.colours) LUT[name] = bytes(DATA.colours[name]);

// Means of consecutive rows: at most `size` of them. The mean of A·Bᵀ over a rectangle is theirs.
function blockMeans(values, rows, columns, size) {
  const step = Math.ceil(rows / size), count = Math.floor(rows / step);
  const out = new Float32Array(count * columns);
  for (let i = 0; i < count * step; i++) {
    const at = ((i / step) | 0) * columns;
    for (let c = 0; c < columns; c++) out[at + c] += values[i * columns + c] / step;
  }
  return { values: out, rows: count, step };
}

function timesTransposed(a, b, rows, columns) {
  const out = new Float32Array(rows * rows), same = a === b;
  for (let i = 0; i < rows; i++) {
    for (let j = same ? i : 0; j < rows; j++) {
      let sum = 0;
      for (let c = 0, p = i * columns, q = j * columns; c < columns; c++) sum += a[p++] * b[q++];
      out[i * rows + j] = sum;
      if (same) out[j * rows + i] = sum;
    }
  }
  return out;
}

// P of a model: the map, and one entry.
function gramOf(model) {
  if (!model.table) return null;
  if (!model.gram) {
    const table = unpack(model.table), n = model.table.rows, d = model.table.columns;
    const small = blockMeans(table, n, d, 512);
    const map = timesTransposed(small.values, small.values, small.rows, d);
    model.gram = { map, side: small.rows, step: small.step, fit: toeplitzOf(map, small.rows) };
  }
  return model.gram;
}

function gramEntry(model, i, j) {
  const table = unpack(model.table), d = model.table.columns;
  let sum = 0;
  for (let c = 0; c < d; c++) sum += table[i * d + c] * table[j * d + c];
  return sum;
}

function toeplitzOf(map, side) {
  const sums = new Float64Array(2 * side - 1), counts = new Float64Array(2 * side - 1);
  for (let i = 0; i < side; i++)
    for (let j = 0; j < side; j++) { sums[j - i + side - 1] += map[i * side + j]; counts[j - i + side - 1]++; }
  return sums.map((s, t) => s / counts[t]);
}

// One head's curve, {offsets, values}, and its kernels if there are any.
function curveOf(model, source, layer, head) {
  const part = source.layers[layer], values = unpack(part.curves), span = part.curves.columns;
  return { first: part.first, values: values.subarray(head * span, (head + 1) * span) };
}

function kernelsOf(source, layer, head, size, whole) {
  const part = source.layers[layer];
  const fits = whole && part.whole ? part.whole : part.near;
  if (!fits) return null;
  const most = Math.min(size, fits.amplitude.length - 1);
  const list = [];
  for (let s = 0; s < most; s++)
    list.push({ a: fits.amplitude[most][head][s], b: fits.sharpness[most][head][s], c: fits.offset[most][head][s] });
  return { list, constant: fits.constant[most][head], r2: fits.r2[most][head], size: most, reach: fits.reach };
}

function kernelSum(list, k) {
  let sum = 0;
  for (const { a, b, c } of list) sum += a * Math.exp(-Math.abs(b) * (k - c) * (k - c));
  return sum;
}

// F̂_P of one head, rows less their mean; from the table's strongest dimensions, or from the curve.
function headMap(model, source, layer, head) {
  const part = source.layers[layer];
  if (!part.maps) {
    const curve = curveOf(model, source, layer, head), side = Math.min(128, 1 - curve.first);
    const map = new Float32Array(side * side), entry = (i, j) => curve.values[j - i - curve.first];
    // A decoder's curve ends at 0: later keys are NaN.
    for (let i = 0; i < side; i++)
      for (let j = 0; j < side; j++) map[i * side + j] = entry(i, j);
    return { map, side, step: 1, entry };
  }
  const basis = source.basis, r = basis.columns, n = basis.rows, z = unpack(basis);
  const m = unpack(part.maps).subarray(head * r * r, (head + 1) * r * r);
  const small = blockMeans(z, n, r, 256), left = new Float32Array(small.rows * r);
  const times = (rowValues, at, out, to) => {
    for (let c = 0; c < r; c++) {
      let sum = 0;
      for (let e = 0; e < r; e++) sum += rowValues[at + e] * m[e * r + c];
      out[to + c] = sum;
    }
  };
  for (let i = 0; i < small.rows; i++) times(small.values, i * r, left, i * r);
  const map = timesTransposed(left, small.values, small.rows, r);
  const one = new Float32Array(r);
  const entry = (i, j) => {
    times(z, i * r, one, 0);
    let sum = 0;
    for (let c = 0; c < r; c++) sum += one[c] * z[j * r + c];
    return sum;
  };
  return { map, side: small.rows, step: small.step, entry };
}

// Rows less their mean, over what a query sees; 0 elsewhere.
function rowCentred(map, side) {
  const out = new Float32Array(map.length);
  for (let i = 0; i < side; i++) {
    const seen = map.subarray(i * side, (i + 1) * side).filter(Number.isFinite);
    const mean = seen.reduce((sum, v) => sum + v / seen.length, 0);
    for (let j = 0; j < side; j++) out[i * side + j] = map[i * side + j] - mean || 0;
  }
  return out;
}

// The value that all but a share of the entries lie below.
function quantile(values, share) {
  const step = Math.max(1, Math.floor(values.length / 60000)), some = [];
  for (let i = 0; i < values.length; i += step) if (Number.isFinite(values[i])) some.push(values[i]);
  some.sort((a, b) => a - b);
  return some.length ? some[Math.min(some.length - 1, Math.max(0, Math.round(share * (some.length - 1))))] : 0;
}
