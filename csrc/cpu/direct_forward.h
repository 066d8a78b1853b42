// conv_relu_pool2d's forward pass without the stock convolution.
//
// A task is a band of output rows of one image (filters in the lanes) or of kLanes images (images
// in the lanes). It copies the input rows it needs, padded, into scratch memory, and for each block
// of filters computes rows of the convolution's output into a ring just large enough for the pool,
// which turns them into values and codes. Nothing larger than the ring is ever held.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "direct_pool.h"
#include "direct_tile.h"

namespace memopt::cpu {

// What a pass over channels reads again should stay in the first-level cache, a band in the second.
constexpr int64_t kPassBytes = 20 << 10;
constexpr int64_t kBandBytes = 640 << 10;

struct ForwardPlan {
  LanesAre lanes = LanesAre::kFilters;
  int units = 1;              // of filters in a block
  int64_t blocks = 1;         // of filters in a group
  int64_t pass_channels = 1;  // in a pass
  int64_t band_rows = 1;      // of outputs
  int64_t bands = 1;
};

template <typename Acc>
int64_t filters_in(const ForwardPlan& plan) {
  return plan.units * (plan.lanes == LanesAre::kFilters ? kLanes<Acc> : 1);
}

// Rows of the convolution's output under `rows` rows of outputs, clipped to it.
inline int64_t conv_rows(const DirectShape& shape, int64_t rows) {
  return std::min(shape.height.input, (rows - 1) * shape.height.stride + shape.height.reach());
}

template <typename Acc>
ForwardPlan plan_forward(const DirectShape& shape, LanesAre lanes) {
  ForwardPlan plan;
  plan.lanes = lanes;
  const bool images = lanes == LanesAre::kImages;
  const int64_t unit = images ? 1 : kLanes<Acc>;
  const int64_t units = (shape.filters + unit - 1) / unit;
  // The block that wastes least, the larger of equals: more arithmetic for each load.
  const int most = images ? (kRegisters > 16 ? 6 : 3) : (kRegisters > 16 ? 4 : 2);
  int64_t least = INT64_MAX;
  for (int u = 1; u <= most; ++u) {
    const int64_t blocks = (units + u - 1) / u;
    // A block costs about as much as half a unit beyond its own.
    const int64_t cost = blocks * (2 * u + 1);
    if (cost <= least) {
      least = cost;
      plan.units = u;
      plan.blocks = blocks;
    }
  }
  // Of one channel: weights that every tile of a row reads again, or pixels that every block does.
  const int64_t row = BandLayout(shape, 1, images ? kLanes<Acc> : 1).row();
  const int64_t again =
      images ? shape.conv_height.kernel * row : shape.taps() * filters_in<Acc>(plan);
  plan.pass_channels = std::clamp<int64_t>(
      (images ? 2 : 1) * kPassBytes / (again * static_cast<int64_t>(sizeof(Acc))), 1,
      shape.channels);
  const auto bytes = [&](int64_t rows) {
    return BandLayout(shape, conv_rows(shape, rows), images ? kLanes<Acc> : 1).size() *
           static_cast<int64_t>(sizeof(Acc));
  };
  // Even, so that two bands never share a byte of codes.
  plan.band_rows = shape.height.output;
  while (plan.band_rows > 2 && bytes(plan.band_rows) > kBandBytes) {
    plan.band_rows = std::max<int64_t>(2, (plan.band_rows + 1) / 2 / 2 * 2);
  }
  plan.bands = (shape.height.output + plan.band_rows - 1) / plan.band_rows;
  return plan;
}

// weight (K, C, R, S), any strides -> (groups, blocks, C, R * S, units), and bias likewise, with
// zeros for filters beyond the last.
template <typename T>
void pack_weight(const DirectShape& shape, const ForwardPlan& plan, const T* weight,
                 const Strides4& ws, const T* bias, int64_t bias_step, acc_t<T>* packed,
                 acc_t<T>* starts) {
  using Acc = acc_t<T>;
  const int64_t filters = filters_in<Acc>(plan), columns = shape.conv_width.kernel;
  torch::stable::parallel_for(0, shape.groups * plan.blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      Acc* to = packed + block * shape.channels * shape.taps() * filters;
      const int64_t first = block % plan.blocks * filters;
      const int64_t count = std::min(filters, shape.filters - first);
      const int64_t k0 = block / plan.blocks * shape.filters + first;
      for (int64_t k = 0; k < filters; ++k) {
        const bool real = k < count && bias != nullptr;
        starts[block * filters + k] = real ? static_cast<Acc>(bias[(k0 + k) * bias_step]) : Acc(0);
      }
      for (int64_t c = 0; c < shape.channels; ++c) {
        for (int64_t t = 0; t < shape.taps(); ++t, to += filters) {
          const T* from = weight + k0 * ws.image + c * ws.channel + t / columns * ws.row +
                          t % columns * ws.column;
          for (int64_t k = 0; k < count; ++k) to[k] = static_cast<Acc>(from[k * ws.image]);
          std::fill(to + count, to + filters, Acc(0));
        }
      }
    }
  });
}

// One row of the convolution's output for one block of filters: out (columns, units * kLanes).
template <typename Acc, LanesAre kLanesAre>
void convolve_row(const DirectShape& shape, const ForwardPlan& plan, const BandLayout& band,
                  const std::vector<int64_t>& offsets, const Acc* x, const Acc* w, const Acc* start,
                  Acc* out) {
  const int64_t columns = shape.columns(), most = max_pixels<kLanesAre>(plan.units);
  const int64_t tiles = (columns + most - 1) / most, pixels = columns / tiles;
  const int64_t longer = columns % tiles;  // tiles of one pixel more
  const auto short_tile = convolve_tile_for<Acc, kLanesAre>(plan.units, static_cast<int>(pixels));
  const auto long_tile =
      longer ? convolve_tile_for<Acc, kLanesAre>(plan.units, static_cast<int>(pixels + 1))
             : short_tile;
  Taps taps{0, band.plane(), shape.taps(), offsets.data()};
  for (int64_t c = 0; c < shape.channels; c += plan.pass_channels) {
    taps.channels = std::min(plan.pass_channels, shape.channels - c);
    const Acc* from = x + c * band.plane();
    Acc* to = out;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t count = pixels + (tile < longer);
      (tile < longer ? long_tile : short_tile)(from, w, taps, c == 0 ? start : nullptr, to);
      from += count * band.unit;
      to += count * plan.units * kLanes<Acc>;
    }
    w += taps.channels * shape.taps() * filters_in<Acc>(plan);
  }
}

template <typename T>
struct ForwardOutputs {
  T* y;
  Strides4 ys;
  uint8_t* codes;  // or null
};

template <typename T, typename Act, LanesAre kLanesAre>
void run_forward(const DirectShape& shape, const Act& act, const ForwardPlan& plan, const T* x,
                 const acc_t<T>* weights, const acc_t<T>* starts, const ForwardOutputs<T>& out) {
  using Acc = acc_t<T>;
  constexpr bool kImages = kLanesAre == LanesAre::kImages;
  constexpr int64_t kLane = kLanes<Acc>;
  const WindowAxis &height = shape.height, &width = shape.width;
  const int64_t lanes_of_images = kImages ? kLane : 1;
  const int64_t image_blocks = (shape.images + lanes_of_images - 1) / lanes_of_images;
  const int64_t filters = filters_in<Acc>(plan), pitch = plan.units * kLane;
  const int64_t weight_block = shape.channels * shape.taps() * filters;
  const int bits = code_bits(shape.states());
  const int64_t code_plane = plane_bytes(shape.outputs(), bits);
  const int64_t all_filters = shape.groups * shape.filters;
  const int64_t ring = std::min(height.input, height.reach());
  const BandLayout band(shape, conv_rows(shape, plan.band_rows), kImages ? kLane : 1);
  const std::vector<int64_t> offsets = band.taps(shape);

  const int64_t tasks = image_blocks * shape.groups * plan.bands;
  const int64_t work = 2 * band.size() * shape.taps() * shape.filters;  // about, in operations
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 20) / std::max<int64_t>(1, work));
  torch::stable::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    Scratch<Acc> input(band.size()), rows(ring * shape.columns() * pitch);
    Scratch<Acc> values(plan.band_rows * width.output * pitch);
    Scratch<uint8_t> codes(bits <= 8 ? plan.band_rows * width.output * pitch : 0);
    Scratch<uint32_t> wide(bits > 8 ? plan.band_rows * width.output * pitch : 0);
    const CodeRows code_rows{bits <= 8 ? codes.data() : nullptr, bits > 8 ? wide.data() : nullptr};
    std::vector<const Acc*> window(height.kernel);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first_oh = task % plan.bands * plan.band_rows;
      const int64_t group = task / plan.bands % shape.groups;
      const int64_t image = task / plan.bands / shape.groups * lanes_of_images;
      const int64_t images = std::min(lanes_of_images, shape.images - image);
      const int64_t last_oh = std::min(height.output, first_oh + plan.band_rows);
      // The first row of the convolution's output that this band has.
      const int64_t top = std::max<int64_t>(0, first_oh * height.stride - height.padding);
      fill_band(shape, band, x + image * shape.x.image + group * shape.channels * shape.x.channel,
                images, top * shape.conv_height.stride - shape.conv_height.padding, input.data());

      for (int64_t block = 0; block < plan.blocks; ++block) {
        const Acc* w = weights + (group * plan.blocks + block) * weight_block;
        const Acc* start = starts + (group * plan.blocks + block) * filters;
        Acc bias[kMaxUnits * kLane];
        for (int64_t i = 0; i < pitch; ++i) bias[i] = start[kImages ? i / kLane : i];
        int64_t next = top;  // row of the convolution's output
        for (int64_t oh = first_oh; oh < last_oh; ++oh) {
          for (int64_t kh = 0; kh < height.kernel; ++kh) {
            const int64_t h = oh * height.stride - height.padding + kh * height.dilation;
            window[kh] = nullptr;
            if (h < 0 || h >= height.input) continue;
            window[kh] = rows.data() + h % ring * shape.columns() * pitch;
            for (next = std::max(next, oh * height.stride - height.padding); next <= h; ++next) {
              convolve_row<Acc, kLanesAre>(
                  shape, plan, band, offsets,
                  input.data() + (next - top) * shape.conv_height.stride * band.row(), w, bias,
                  rows.data() + next % ring * shape.columns() * pitch);
            }
          }
          const int64_t place = (oh - first_oh) * width.output * pitch;
          pool_row<T>(shape, act, window, plan.units, dead_code(bits), values.data() + place,
                      code_rows.from(place));
        }

        const int64_t outputs = (last_oh - first_oh) * width.output;
        const int64_t first_output = first_oh * width.output;
        for (int64_t j = 0; j < plan.units; ++j) {
          const int64_t k = block * filters + (kImages ? j : j * kLane);  // within the group
          if (k >= shape.filters) break;
          const int64_t lanes = kImages ? images : std::min(kLane, shape.filters - k);
          const int64_t plane = image * all_filters + group * shape.filters + k;
          store_values<T>(
              values.data() + j * kLane, pitch, outputs,
              {out.y + image * out.ys.image + (group * shape.filters + k) * out.ys.channel +
                   first_output * out.ys.column,
               kImages ? out.ys.image : out.ys.channel, out.ys.column, lanes});
          if (out.codes == nullptr) continue;
          const Planes<uint8_t> planes{out.codes + plane * code_plane + first_output * bits / 8,
                                       (kImages ? all_filters : 1) * code_plane, 1, lanes};
          if (bits <= 8) {
            store_packed<kLane>(codes.data() + j * kLane, pitch, outputs, bits, planes);
          } else {
            store_words(wide.data() + j * kLane, pitch, outputs, bits, planes);
          }
        }
      }
    }
  });
}

// Share of the arithmetic that is not spent on lanes and units beyond the last image or filter.
template <typename Acc>
double efficiency(const DirectShape& shape, const ForwardPlan& plan) {
  const double filters =
      static_cast<double>(shape.filters) / static_cast<double>(plan.blocks * filters_in<Acc>(plan));
  if (plan.lanes == LanesAre::kFilters) return filters;
  const int64_t lanes = (shape.images + kLanes<Acc> - 1) / kLanes<Acc> * kLanes<Acc>;
  return filters * static_cast<double>(shape.images) / static_cast<double>(lanes);
}

// Images in the lanes where that wastes less and a band of them is not too large; filters
// otherwise.
template <typename Acc>
ForwardPlan choose_forward(const DirectShape& shape) {
  const ForwardPlan filters = plan_forward<Acc>(shape, LanesAre::kFilters);
  const ForwardPlan images = plan_forward<Acc>(shape, LanesAre::kImages);
  const BandLayout band(shape, conv_rows(shape, images.band_rows), kLanes<Acc>);
  const bool fits = band.size() * static_cast<int64_t>(sizeof(Acc)) <= 2 * kBandBytes;
  const bool better = efficiency<Acc>(shape, images) > 1.05 * efficiency<Acc>(shape, filters);
  return fits && better ? images : filters;
}

// The whole forward pass.
template <typename T, typename Act>
void direct_forward(const DirectShape& shape, const Act& act, const T* x, const T* weight,
                    const Strides4& ws, const T* bias, int64_t bias_step,
                    const ForwardOutputs<T>& out) {
  using Acc = acc_t<T>;
  if (shape.images == 0) return;
  const ForwardPlan plan = choose_forward<Acc>(shape);
  const int64_t filters = shape.groups * plan.blocks * filters_in<Acc>(plan);
  Scratch<Acc> weights(filters * shape.channels * shape.taps()), starts(filters);
  pack_weight(shape, plan, weight, ws, bias, bias_step, weights.data(), starts.data());
  const auto run = plan.lanes == LanesAre::kImages ? run_forward<T, Act, LanesAre::kImages>
                                                   : run_forward<T, Act, LanesAre::kFilters>;
  run(shape, act, plan, x, weights.data(), starts.data(), out);
}

}  // namespace memopt::cpu
