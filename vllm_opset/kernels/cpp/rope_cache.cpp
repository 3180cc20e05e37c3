// rope_cache and qk_norm_rope_cache, which differ only in the norms before the rotation.
#include "_norm.h"
#include "_rotate.h"

namespace opset {
namespace {

// The parameters of a layer. Strides are in elements. The weights are null without norms. table: [table_rows, 2 * half].
struct Layer {
    int64_t type, weight_type, table_type, heads, kv_heads, size, half, neox;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    int64_t table_rows, num_slots, block_size, cache_block, cache_head, cache_slot;
    float epsilon, offset;
    const void *q_weight, *k_weight, *table;
};

// One head: its norm, its rotation, and the result in `to`, which may be where it comes from. wide: space for a head.
template <class E, class W, class C>
inline void turn(const E* from, const W* weight, const C* cos, const Layer& layer, float* wide, E* to) {
    const float squares = widen_row(from, static_cast<E*>(nullptr), layer.size, wide);
    const float factor = 1 / std::sqrt(squares / layer.size + layer.epsilon);
    if (weight) scale_row(wide, factor, weight, layer.offset, layer.size, wide);
    rotate(wide, cos, cos + layer.half, layer.half, layer.neox != 0);
#pragma omp simd
    for (int64_t i = 0; i < layer.size; i++) to[i] = narrow<E>(wide[i]);
}

template <class E, class W, class C>
void turn_all(E* query, const E* key, const E* value, E* cache, const int64_t* positions, const int64_t* slots,
              int64_t tokens, int64_t cached, const Layer& layer) {
    const W *q_weight = static_cast<const W*>(layer.q_weight), *k_weight = static_cast<const W*>(layer.k_weight);
    const int64_t size = layer.size;
    const int64_t elements = tokens * (layer.heads + layer.kv_heads) * size;
    parallel_for(tokens, 1, elements > WORTH_THREADS, [&](int64_t begin, int64_t end) {
        std::vector<float> wide(size);
        for (int64_t token = begin; token < end; token++) {
            const C* cos = static_cast<const C*>(layer.table) + positions[token] * 2 * layer.half;
            for (int64_t head = 0; head < layer.heads; head++) {
                E* at = query + token * layer.query_token + head * layer.query_head;
                turn(at, q_weight, cos, layer, wide.data(), at);
            }
            if (token >= cached || slots[token] < 0) continue;
            E* slot = cache + slots[token] / layer.block_size * layer.cache_block +
                      slots[token] % layer.block_size * layer.cache_slot;
            for (int64_t head = 0; head < layer.kv_heads; head++) {
                E* at = slot + head * layer.cache_head;
                turn(key + token * layer.key_token + head * layer.key_head, k_weight, cos, layer, wide.data(), at);
                std::memcpy(at + size, value + token * layer.value_token + head * layer.value_head, size * sizeof(E));
            }
        }
    });
}

}  // namespace

// query: [tokens, heads, size], key, value: [tokens, kv_heads, size], with the layer's strides. positions: [tokens].
// slots: [cached] of the first tokens, negative for a token that is not cached. If the table lacks a token's position,
// returns the first such token; if the cache lacks a token's slot, `tokens` and the first such token, added. Nothing is
// written then. Otherwise returns -1.
extern "C" int64_t rope_cache(const Layer* layer, void* query, const void* key, const void* value, void* cache,
                              const int64_t* positions, const int64_t* slots, int64_t tokens, int64_t cached) {
    for (int64_t token = 0; token < tokens; token++)
        if (positions[token] < 0 || positions[token] >= layer->table_rows) return token;
    for (int64_t token = 0; token < cached; token++)
        if (slots[token] >= layer->num_slots) return tokens + token;
    with_type(layer->type, [&](auto* element) {
        using E = std::remove_pointer_t<decltype(element)>;
        with_type(layer->weight_type, [&](auto* of_weight) {
            using W = std::remove_pointer_t<decltype(of_weight)>;
            with_type(layer->table_type, [&](auto* of_table) {
                using C = std::remove_pointer_t<decltype(of_table)>;
                turn_all<E, W, C>(static_cast<E*>(query), static_cast<const E*>(key), static_cast<const E*>(value),
                                  static_cast<E*>(cache), positions, slots, tokens, cached, *layer);
            });
        });
    });
    return -1;
}

}  // namespace opset
