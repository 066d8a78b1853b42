// Packing tensors into 2, 4 or 8 bits an element: docs/storage_format.md.
#include "quantize.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../common/check.h"
#include "../common/dispatch.h"
#include "convert.h"
#include "philox.h"
#include "quantize_loops.h"
#include "strided.h"

namespace memopt::cpu {

using torch::stable::Tensor;

namespace {

static_assert(kRun % kPhiloxElements == 0, "uniform numbers come in whole vectors");

constexpr int64_t kGrain = 32 * 1024;  // elements per task

// Reads a tensor's elements in row-major order as float32.
template <typename T>
class Reader {
 public:
  Reader(const Tensor& tensor, int64_t begin)
      : data_(tensor.const_data_ptr<T>()),
        dense_(tensor.is_contiguous()),
        position_(begin),
        cursor_(tensor, dense_ ? 0 : begin) {}

  // The next `count` elements: in `buffer`, or where they lie.
  const float* read(int64_t count, float* buffer) {
    if (dense_) {
      const T* source = data_ + position_;
      position_ += count;
      if constexpr (std::is_same_v<T, float>) return source;
      load_floats(source, 1, count, buffer);
      return buffer;
    }
    for (int64_t done = 0; done < count;) {
      const int64_t run = std::min(count - done, cursor_.run());
      load_floats(data_ + cursor_.offset(), cursor_.step(), run, buffer + done);
      cursor_.skip(run);
      done += run;
    }
    return buffer;
  }

 private:
  const T* data_;
  bool dense_;
  int64_t position_;
  StridedCursor cursor_;
};

struct Target {
  uint8_t* packed;
  BFloat16 *scale, *minimum;
  int bits;
  int64_t group_size;
  std::optional<uint64_t> seed;

  void write(int64_t group, const GroupScale& values) const {
    scale[group].x = values.scale;
    minimum[group].x = values.minimum;
  }
};

// Codes and packs one run: elements [first, first + count), first a multiple of 8.
class Packer {
 public:
  explicit Packer(const Target& target) : target_(target) {}

  void begin(int64_t first, int64_t count) {
    first_ = first;
    count_ = count;
    if (target_.seed) uniforms(*target_.seed, first, count, thresholds_);
  }
  void encode(const float* x, int64_t from, int64_t count, const GroupScale& group) {
    encode_run(x + from, count, group, quantized_levels(target_.bits),
               target_.seed ? thresholds_ + from : nullptr, codes_ + from);
  }
  void finish() {
    pack_codes(codes_, count_, target_.bits,
               target_.packed + quantized_bytes(first_, target_.bits));
  }

 private:
  const Target& target_;
  int64_t first_ = 0, count_ = 0;
  alignas(64) float thresholds_[kRun];
  alignas(64) uint8_t codes_[kRun + 8];
};

// Groups [group, last) that fit in a run: several are packed at once.
template <typename T>
void quantize_small_groups(const Tensor& input, const Target& target, int64_t group, int64_t last) {
  const int64_t size = target.group_size, numel = input.numel();
  const int levels = quantized_levels(target.bits);
  alignas(64) float buffer[kRun];
  Packer packer(target);
  Reader<T> reader(input, group * size);
  while (group < last) {
    const int64_t first = group * size;
    const int64_t end = std::min(numel, std::min(last, group + kRun / size) * size);
    const float* x = reader.read(end - first, buffer);
    packer.begin(first, end - first);
    for (int64_t at = first; at < end; at += size, ++group) {
      const int64_t count = std::min(size, end - at);
      KeyRange range;
      extend(range, x + (at - first), count);
      const GroupScale scale = group_scale(range.low, range.high, levels);
      target.write(group, scale);
      packer.encode(x, at - first, count, scale);
    }
    packer.finish();
  }
}

// Groups [group, last) that are longer than a run: each is read twice, a run at a time.
template <typename T>
void quantize_large_groups(const Tensor& input, const Target& target, int64_t group, int64_t last) {
  alignas(64) float buffer[kRun];
  Packer packer(target);
  for (; group < last; ++group) {
    const int64_t first = group * target.group_size;
    const int64_t end = first + std::min(target.group_size, input.numel() - first);
    KeyRange range;
    Reader<T> measured(input, first);
    for (int64_t at = first; at < end; at += kRun) {
      const int64_t count = std::min(kRun, end - at);
      extend(range, measured.read(count, buffer), count);
    }
    const GroupScale scale = group_scale(range.low, range.high, quantized_levels(target.bits));
    target.write(group, scale);
    Reader<T> reader(input, first);
    for (int64_t at = first; at < end; at += kRun) {
      const int64_t count = std::min(kRun, end - at);
      packer.begin(at, count);
      packer.encode(reader.read(count, buffer), 0, count, scale);
      packer.finish();
    }
  }
}

}  // namespace

void check_format(const char* op, int64_t bits, int64_t group_size) {
  MEMOPT_CHECK(bits == 2 || bits == 4 || bits == 8, op, ": bits is ", bits, ", needs 2, 4 or 8");
  MEMOPT_CHECK(group_size > 0 && group_size % 8 == 0, op, ": group_size is ", group_size,
               ", needs a positive multiple of 8");
}

std::tuple<Tensor, Tensor, Tensor> quantize_tensor(const char* op, const Tensor& input,
                                                   int64_t bits, int64_t group_size,
                                                   const std::optional<Tensor>& seed) {
  check_format(op, bits, group_size);
  if (seed) {
    MEMOPT_CHECK(seed->scalar_type() == ScalarType::Long && seed->dim() == 0 && seed->is_cpu(), op,
                 ": seed is ", toString(seed->scalar_type()), " with ", seed->dim(),
                 " dimensions, needs int64 with none, on input's device");
  }
  const int64_t numel = input.numel(), groups = quantized_groups(numel, group_size);
  Tensor packed =
      torch::stable::empty({quantized_bytes(numel, static_cast<int>(bits))}, ScalarType::Byte);
  Tensor scale = torch::stable::empty({groups}, ScalarType::BFloat16);
  Tensor minimum = torch::stable::empty({groups}, ScalarType::BFloat16);
  Target target{packed.mutable_data_ptr<uint8_t>(),
                scale.mutable_data_ptr<BFloat16>(),
                minimum.mutable_data_ptr<BFloat16>(),
                static_cast<int>(bits),
                group_size,
                std::nullopt};
  if (seed) target.seed = static_cast<uint64_t>(*seed->const_data_ptr<int64_t>());
  dispatch_floating(input.scalar_type(), op, "input", [&](auto zero) {
    using T = decltype(zero);
    const int64_t grain = std::max<int64_t>(1, kGrain / group_size);
    torch::stable::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
      (group_size <= kRun ? quantize_small_groups<T> : quantize_large_groups<T>)(input, target,
                                                                                 begin, end);
    });
  });
  return {packed, scale, minimum};
}

namespace {

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& input, int64_t bits, int64_t group_size,
                                            const std::optional<Tensor>& seed) {
  return quantize_tensor("quantize", input, bits, group_size, seed);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(memopt, CPU, m) { m.impl("quantize", TORCH_BOX(&quantize)); }

}  // namespace memopt::cpu
