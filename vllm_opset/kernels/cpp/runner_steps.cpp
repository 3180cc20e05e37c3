// What vLLM's second model runner launches in each step: its inputs, and the requests' state after it. The functions of
// the same names in platform/cpu/runner_kernels say what each does.
#include "_types.h"

namespace opset {

// The request of each place in a batch, in 4 or 8 bytes.
struct Requests {
    const void* data;
    int64_t size;
    int64_t operator[](int64_t i) const {
        return size == 8 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    }
};

extern "C" void prepare_pos_seq_lens(const void* request, int64_t size, int64_t num_reqs, int64_t* pos,
                                     int32_t* seq_lens, const int32_t* starts, const int32_t* computed,
                                     int64_t max_num_reqs) {
    const Requests requests{request, size};
    for (int64_t i = 0; i < num_reqs; i++) {
        const int64_t before = computed[requests[i]];
        seq_lens[i] = before + starts[i + 1] - starts[i];
        for (int64_t token = starts[i]; token < starts[i + 1]; token++) pos[token] = before + token - starts[i];
    }
    std::fill(seq_lens + num_reqs, seq_lens + max_num_reqs, 0);
}

extern "C" void combine_sampled_and_draft_tokens(const void* request, int64_t size, int64_t num_reqs,
                                                 int32_t* input_ids, const int64_t* last, const int32_t* starts,
                                                 const int32_t* seq_lens, const int32_t* prefill_len,
                                                 const int64_t* drafts, int64_t drafts_stride,
                                                 const int32_t* first_logits, int64_t* logits_indices,
                                                 int64_t num_new) {
    const Requests requests{request, size};
    for (int64_t i = 0; i < num_reqs; i++) {
        const int64_t end = starts[i + 1], num_logits = first_logits[i + 1] - first_logits[i];
        for (int64_t j = 0; j < num_logits; j++) logits_indices[first_logits[i] + j] = end - num_logits + j;
        const int64_t known = prefill_len[requests[i]];
        if (seq_lens[i] <= known) continue;
        if (num_new && seq_lens[i] - num_logits >= known) input_ids[end - num_logits] = last[requests[i]];
        const int64_t drafted = num_logits - num_new;
        for (int64_t j = 0; j < drafted; j++) input_ids[end - drafted + j] = drafts[requests[i] * drafts_stride + j];
    }
}

extern "C" void get_num_sampled_and_rejected(const void* request, int64_t size, int64_t num_reqs, int32_t* sampled,
                                             int32_t* rejected, const int32_t* seq_lens, const int32_t* first_logits,
                                             const int32_t* prefill_len) {
    const Requests requests{request, size};
    for (int64_t i = 0; i < num_reqs; i++) {
        const bool prefills = seq_lens[i] < prefill_len[requests[i]];
        if (prefills) sampled[i] = 0;
        rejected[i] = prefills ? 0 : first_logits[i + 1] - first_logits[i] - sampled[i];
    }
}

// counts and starts may be null.
extern "C" void post_update(const void* request, int64_t size, int64_t num_reqs, int32_t* computed, int64_t* last,
                            int32_t* counts, int64_t counts_stride, const int64_t* tokens, int64_t tokens_stride,
                            int64_t most_tokens, const int32_t* sampled, const int32_t* rejected,
                            const int32_t* starts, int32_t* all_tokens, int64_t all_tokens_stride,
                            int32_t* total_len) {
    const Requests requests{request, size};
    for (int64_t i = 0; i < num_reqs; i++) {
        const int64_t of = requests[i];
        if (of < 0) continue;
        for (int64_t j = 0; j < std::min<int64_t>(sampled[i], most_tokens); j++) {
            const int64_t token = tokens[i * tokens_stride + j];
            all_tokens[of * all_tokens_stride + total_len[of] + j] = token;
            last[of] = token;
            if (counts) counts[of * counts_stride + token]++;
        }
        total_len[of] += sampled[i];
        computed[of] += (starts ? starts[i + 1] - starts[i] : 0) - rejected[i];
    }
}

// num_blocks is [groups, max_num_reqs]. reach is null where sliding windows mask nothing.
extern "C" void gather_block_tables(const void* request, int64_t size, int64_t num_reqs, const int32_t* const* sources,
                                    int32_t* const* targets, const int64_t* strides, const int32_t* num_blocks,
                                    int64_t groups, int64_t max_num_reqs, const int32_t* computed,
                                    const int32_t* reach, const int32_t* block_sizes) {
    const Requests requests{request, size};
    for (int64_t group = 0; group < groups; group++)
        for (int64_t i = 0; i < num_reqs; i++) {
            const int64_t of = requests[i], blocks = num_blocks[group * max_num_reqs + of];
            const int32_t* source = sources[group] + of * strides[group];
            int32_t* target = targets[group] + i * strides[group];
            int64_t left = 0;
            if (reach && reach[group]) left = std::max(computed[of] - reach[group], 0) / block_sizes[group];
            left = std::min(left, blocks);
            std::fill(target, target + left, 0);
            std::copy(source + left, source + blocks, target + left);
        }
}

extern "C" void compute_slot_mappings(const void* request, int64_t size, int64_t num_reqs, const int32_t* starts,
                                      const int64_t* pos, const int32_t* const* tables, const int64_t* strides,
                                      const int32_t* block_sizes, const bool* enabled, int64_t* slots,
                                      int64_t groups, int64_t max_num_tokens, int64_t pad) {
    const Requests requests{request, size};
    for (int64_t group = 0; group < groups; group++, slots += max_num_tokens) {
        const int64_t block_size = block_sizes[group], num_tokens = enabled[group] ? starts[num_reqs] : 0;
        for (int64_t i = 0; enabled[group] && i < num_reqs; i++) {
            const int32_t* table = tables[group] + requests[i] * strides[group];
            for (int64_t token = starts[i]; token < starts[i + 1]; token++)
                slots[token] = requests[i] < 0 ? pad
                                               : table[pos[token] / block_size] * block_size + pos[token] % block_size;
        }
        std::fill(slots + num_tokens, slots + max_num_tokens, pad);
    }
}

}  // namespace opset
