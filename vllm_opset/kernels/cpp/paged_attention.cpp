// paged_attention for requests with few query tokens. It handles each row separately, in fp32, and reads keys and
// values in place.
#include "_vector.h"

namespace opset {
namespace {

// The parameters of a call. Strides are in elements. A left or right of -1 means that the window has no such side.
struct Layer {
    int64_t num_heads, num_kv_heads, head_size, block_size;
    int64_t query_token, query_head, out_token, out_head, cache_block, cache_head, cache_slot, table_row;
    int64_t left, right;
    float scale, value_scale, soft_cap;
    const float *slopes, *sinks;
};

// Keys first .. last of one request and KV head, in runs within one page.
template <class E>
struct Keys {
    const E* cache;
    const int32_t* pages;
    int64_t first, last, block_size, cache_block, cache_slot;

    const E* key(int64_t position) const {
        return cache + pages[position / block_size] * cache_block + position % block_size * cache_slot;
    }

    // Calls f(key, number, next) for runs of at most LANES keys: the address of the first key, the number of keys,
    // which are cache_slot apart, and the address of the next run, or null.
    template <class F>
    void each_run(F f) const {
        for (int64_t at = first; at <= last;) {
            const int64_t number = std::min<int64_t>({LANES, block_size - at % block_size, last + 1 - at});
            const E* start = key(at);
            at += number;
            f(start, number, at <= last ? key(at) : nullptr);
        }
    }

    // Prefetches the keys and values of the next run, because the processor cannot predict its page.
    void fetch(const E* run, int64_t size) const {
        constexpr int64_t LINE = 64 / sizeof(E);
        if (run)
            for (int64_t lane = 0; lane < LANES; lane++)
                for (int64_t element = 0; element < 2 * size; element += LINE)
                    __builtin_prefetch(run + lane * cache_slot + element);
    }
};

// The keys of a run as rows of floats, in place or widened into `tile`. Lanes beyond the run repeat its last key.
inline void rows_of(const float* key, int64_t number, int64_t stride, int64_t, float*, const float* (&rows)[LANES]) {
    for (int lane = 0; lane < LANES; lane++) rows[lane] = key + std::min<int64_t>(lane, number - 1) * stride;
}

inline void rows_of(const bfloat16* key, int64_t number, int64_t stride, int64_t size, float* tile,
                    const float* (&rows)[LANES]) {
    for (int64_t lane = 0; lane < number; lane++)
        for (int64_t element = 0; element < size; element += PART)
            store_part(tile + lane * size + element, load_part(key + lane * stride + element));
    rows_of(tile, number, size, size, tile, rows);
}

// Lane i of the result is query . rows[i], for PART rows. Their sums fit the registers.
inline PartFloats multiply_some(const float* query, const float* const* rows, int64_t size) {
    PartFloats partial[PART] = {};
    for (int64_t element = 0; element < size; element += PART) {
        const PartFloats inputs = load_part(query + element);
#pragma GCC unroll 16
        for (int row = 0; row < PART; row++) partial[row] += inputs * load_part(rows[row] + element);
    }
    return sums(partial);
}

// scores[head][i] = queries[head] . key i, for all query heads of a KV head. The queries are rows of size floats.
template <class E>
void multiply_keys(const float* queries, const Keys<E>& keys, int64_t group, int64_t size, float* tile, float* scores) {
    const int64_t stride = keys.last + 1 - keys.first;
    keys.each_run([&](const E* key, int64_t number, const E* next) {
        keys.fetch(next, size);
        const float* rows[LANES];
        rows_of(key, number, keys.cache_slot, size, tile, rows);
        for (int64_t head = 0; head < group; head++) {
            float run[LANES];
            for (int64_t first = 0; first < number; first += PART)
                store_part(run + first, multiply_some(queries + head * size, rows + first, size));
            std::memcpy(scores + head * stride, run, number * sizeof(float));
        }
        scores += number;
    });
}

// out[head] = weights[head] . values, in VECTORS * PART columns of HEADS query heads. Each value is read once for all
// heads. Each sum is sequential, but there are enough sums to keep the multipliers busy.
template <int HEADS, int VECTORS, class E>
void multiply_columns(const float* weights, int64_t stride, const Keys<E>& values, int64_t size, float* out) {
    PartFloats sum[HEADS][VECTORS] = {};
    values.each_run([&](const E* value, int64_t number, const E*) {
        for (int64_t i = 0; i < number; i++, weights++)
            for (int part = 0; part < VECTORS; part++) {
                const PartFloats v = load_part(value + i * values.cache_slot + part * PART);
                for (int head = 0; head < HEADS; head++) sum[head][part] += weights[head * stride] * v;
            }
    });
    for (int head = 0; head < HEADS; head++)
        for (int part = 0; part < VECTORS; part++) store_part(out + head * size + part * PART, sum[head][part]);
}

template <int HEADS, class E>
void multiply_values(const float* weights, Keys<E> values, int64_t size, float* out) {
    constexpr int VECTORS = HEADS > 2 ? 2 : 4;
    const int64_t stride = values.last + 1 - values.first;
    int64_t element = 0;
    for (; element + VECTORS * PART <= size; element += VECTORS * PART, values.cache += VECTORS * PART)
        multiply_columns<HEADS, VECTORS>(weights, stride, values, size, out + element);
    for (; element < size; element += PART, values.cache += PART)
        multiply_columns<HEADS, 1>(weights, stride, values, size, out + element);
}

// Turns scores into softmax weights, times value_scale. distance: position of the first key − position of the query.
void softmax(float* scores, int64_t number, int64_t distance, const Layer& layer, int64_t head) {
    if (layer.soft_cap > 0) {
#pragma omp simd
        for (int64_t i = 0; i < number; i++) {
            const float t = exp(-2 * std::abs(scores[i] / layer.soft_cap));
            scores[i] = std::copysign(layer.soft_cap * (1 - t) / (1 + t), scores[i]);
        }
    }
    if (layer.slopes) {
#pragma omp simd
        for (int64_t i = 0; i < number; i++) scores[i] += layer.slopes[head] * float(distance + i);
    }
    float largest = layer.sinks ? layer.sinks[head] : scores[0];
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < number; i++) largest = std::max(largest, scores[i]);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < number; i++) sum += scores[i] = exp(scores[i] - largest);
    if (layer.sinks) sum += exp(layer.sinks[head] - largest);
    const float factor = layer.value_scale / sum;
#pragma omp simd
    for (int64_t i = 0; i < number; i++) scores[i] *= factor;
}

// Attention of the query heads of one KV head, for one row at `position`.
template <class E>
void attend(const E* query, Keys<E> keys, E* out, int64_t position, int64_t kv_head, const Layer& layer,
            std::vector<float>& space) {
    const int64_t group = layer.num_heads / layer.num_kv_heads, size = layer.head_size;
    const int64_t number = keys.last + 1 - keys.first;
    space.resize(group * (number + size) + LANES * size);
    float *weights = space.data(), *rows = weights + group * number, *tile = rows + group * size;
    for (int64_t head = 0; head < group; head++)
        for (int64_t i = 0; i < size; i++)
            rows[head * size + i] = widen(query[head * layer.query_head + i]) * layer.scale;
    multiply_keys(rows, keys, group, size, tile, weights);
    for (int64_t head = 0; head < group; head++)
        softmax(weights + head * number, number, keys.first - position, layer, kv_head * group + head);
    keys.cache += size;  // from the keys to the values
    for (int64_t head = 0; head < group; head += 4) {
        const float* from = weights + head * number;
        float* to = rows + head * size;
        switch (group - head) {
            case 1: multiply_values<1>(from, keys, size, to); break;
            case 2: multiply_values<2>(from, keys, size, to); break;
            case 3: multiply_values<3>(from, keys, size, to); break;
            default: multiply_values<4>(from, keys, size, to);
        }
    }
    for (int64_t head = 0; head < group; head++)
        for (int64_t i = 0; i < size; i++) out[head * layer.out_head + i] = narrow<E>(rows[head * size + i]);
}

template <class E>
void attend_all(const E* query, const E* cache, E* out, const int32_t* query_start_loc, const int32_t* seq_lens,
                const int32_t* block_table, int64_t num_reqs, int64_t most_tokens, const Layer& layer) {
    const int64_t tasks = num_reqs * layer.num_kv_heads;
    const int64_t group = layer.num_heads / layer.num_kv_heads;
    parallel_for(tasks, 1, true, [&](int64_t begin, int64_t end) {
        std::vector<float> space;
        for (int64_t task = begin; task < end; task++) {
            const int64_t request = task / layer.num_kv_heads, kv_head = task % layer.num_kv_heads;
            const int64_t start = query_start_loc[request], stop = query_start_loc[request + 1];
            if (stop - start > most_tokens) continue;
            const int64_t seq_len = seq_lens[request];
            for (int64_t row = start; row < stop; row++) {
                const int64_t position = seq_len - stop + row;
                const int64_t first = layer.left < 0 ? 0 : std::max<int64_t>(0, position - layer.left);
                const int64_t last = layer.right < 0 ? seq_len - 1 : std::min(seq_len - 1, position + layer.right);
                E* to = out + row * layer.out_token + kv_head * group * layer.out_head;
                if (first > last) {  // the row sees no key
                    for (int64_t head = 0; head < group; head++)
                        std::fill_n(to + head * layer.out_head, layer.head_size, narrow<E>(0));
                    continue;
                }
                const Keys<E> keys{cache + kv_head * layer.cache_head, block_table + request * layer.table_row, first,
                                   last, layer.block_size, layer.cache_block, layer.cache_slot};
                attend(query + row * layer.query_token + kv_head * group * layer.query_head, keys, to, position,
                       kv_head, layer, space);
            }
        }
    });
}

}  // namespace

// Requests with more than most_tokens query tokens are left out.
extern "C" void paged_attention(int64_t type, const void* query, const void* cache, void* out,
                                const int32_t* query_start_loc, const int32_t* seq_lens, const int32_t* block_table,
                                int64_t num_reqs, int64_t most_tokens, const Layer* layer) {
    with_type(type, [&](auto* element) {
        using E = std::remove_pointer_t<decltype(element)>;
        attend_all(static_cast<const E*>(query), static_cast<const E*>(cache), static_cast<E*>(out), query_start_loc,
                   seq_lens, block_table, num_reqs, most_tokens, *layer);
    });
}

}  // namespace opset
