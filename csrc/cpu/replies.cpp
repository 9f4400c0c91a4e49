// The tokens of a rollout server's JSON answer, read in one pass over its bytes.
//
// Two arrays are nearly all of an answer: meta_info.output_token_logprobs, of [log-probability, id, null], and
// output_ids. They are read here, and said to be where they lie, so that a general reader gets the few other bytes. On
// whatever is not of the plain form, valid JSON or not, this reader gives up and says nothing: the general one decides.
//
// Everything else is walked over, not checked. On valid JSON the walk is right, and what is left once the arrays are cut
// out is valid if and only if the whole was: so who checks the rest has checked all.
#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>
#include <utility>

#include "../tensors.h"

namespace {

constexpr double POWERS_OF_10[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,
                                   1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19};

struct Limits {
  int64_t vocab_size, at_most;
  double lowest, highest;
};

struct Cut {
  int64_t begin = 0, end = 0;
};

class Reader {
 public:
  Reader(const char* begin, int64_t size, Limits limits) : begin_(begin), at_(begin), end_(begin + size), limits_(limits) {}

  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  Cut ids_cut, tokens_cut;

  bool answer() {
    bool seen_ids = false, seen_meta = false, seen_tokens = false;
    std::vector<int32_t> said;
    auto meta = [&](std::string_view key) {
      if (key != "output_token_logprobs") return skip_value();
      return !std::exchange(seen_tokens, true) && array(tokens_cut, [&] { return token(); });
    };
    auto root = [&](std::string_view key) {
      if (key == "output_ids") return !std::exchange(seen_ids, true) && array(ids_cut, [&] { return id(said); });
      if (key != "meta_info") return skip_value();
      return !std::exchange(seen_meta, true) && object(meta);
    };
    return object(root) && (ids_cut.end == 0 || said == ids);
  }

 private:
  const char *begin_, *at_, *end_;
  Limits limits_;

  void spaces() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) at_++;
  }

  bool take(char c) {
    spaces();
    if (at_ == end_ || *at_ != c) return false;
    at_++;
    return true;
  }

  template <class Member>
  bool object(Member member) {
    if (!take('{')) return false;
    if (take('}')) return true;
    do {
      if (!take('"')) return false;
      const char* key = at_;
      while (at_ < end_ && *at_ != '"' && *at_ != '\\') at_++;
      if (at_ == end_ || *at_ == '\\') return false;  // an escaped key may be any key
      const std::string_view name(key, at_ - key);
      at_++;
      if (!take(':') || !member(name)) return false;
    } while (take(','));
    return take('}');
  }

  template <class Entry>
  bool array(Cut& cut, Entry entry) {
    if (!take('[')) return skip_value();  // null where there are no tokens
    const char* begin = at_ - 1;
    if (!take(']')) {
      do {
        if (!entry()) return false;
      } while (take(','));
      if (!take(']')) return false;
    }
    cut = {begin - begin_, at_ - begin_};
    return true;
  }

  bool token() {
    if (!take('[') || !logprob() || !take(',') || !id(ids) || !take(',') || !null() || !take(']')) return false;
    return int64_t(ids.size()) <= limits_.at_most;
  }

  bool null() {
    if (!take('n') || end_ - at_ < 3 || memcmp(at_, "ull", 3) != 0) return false;
    at_ += 3;
    return true;
  }

  // Appends digits to a number, which is whole up to 19 of them; returns how many there were.
  int64_t digits(uint64_t& number) {
    const char* first = at_;
    while (at_ < end_ && *at_ >= '0' && *at_ <= '9') number = 10 * number + uint64_t(*at_++ - '0');
    return at_ - first;
  }

  // -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?, which is JSON's form and narrower than from_chars'.
  bool logprob() {
    const bool negative = take('-');  // and the spaces before it; none may follow
    const char* first = at_;
    uint64_t number = 0, exponent = 0;
    const int64_t whole = digits(number);
    if (whole == 0 || (whole > 1 && *first == '0')) return false;
    int64_t decimals = 0;
    bool is_integer = true, is_exact = true;
    if (at_ < end_ && *at_ == '.') {
      at_++, is_integer = false;
      decimals = digits(number);
      if (decimals == 0) return false;
    }
    if (at_ < end_ && (*at_ == 'e' || *at_ == 'E')) {
      at_++, is_integer = is_exact = false;
      if (at_ < end_ && (*at_ == '+' || *at_ == '-')) at_++;
      if (digits(exponent) == 0) return false;
    }
    double value;
    if (is_exact && whole + decimals <= 19 && number <= uint64_t(1) << 53) {
      value = double(number) / POWERS_OF_10[decimals];  // both are exact, so that their quotient is rounded once
    } else {
      const auto [stop, error] = std::from_chars(first, at_, value);
      if (error != std::errc() || stop != at_) return false;  // beyond a double, or closer to 0 than one
    }
    if (negative && !(is_integer && value == 0)) value = -value;  // the integer -0 is 0
    if (!(limits_.lowest <= value && value <= limits_.highest)) return false;
    logprobs.push_back(static_cast<float>(value));
    return true;
  }

  bool id(std::vector<int32_t>& found) {
    spaces();
    const char* first = at_;
    uint64_t value = 0;
    const int64_t count = digits(value);
    if (count == 0 || count > 10 || (count > 1 && *first == '0')) return false;
    if (int64_t(value) >= limits_.vocab_size) return false;
    found.push_back(static_cast<int32_t>(value));
    return true;
  }

  bool skip_string() {  // behind its opening quote
    for (; at_ < end_; at_++) {
      if (*at_ == '"') return at_++, true;
      if (*at_ == '\\') at_++;
    }
    return false;
  }

  bool skip_value() {
    int64_t depth = 0;
    while (at_ < end_) {
      const char c = *at_;
      if (depth == 0 && (c == ',' || c == '}' || c == ']')) return true;
      at_++;
      if (c == '"' && !skip_string()) return false;
      depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    }
    return false;
  }
};

template <class X>
Tensor tensor_of(const Tensor& like, const std::vector<X>& values, ScalarType type) {
  Tensor tensor = new_tensor(like, {int64_t(values.size())}, type);
  if (!values.empty()) memcpy(tensor.data_ptr(), values.data(), values.size() * sizeof(X));
  return tensor;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> reply_tokens(
    Tensor content, int64_t vocab_size, int64_t at_most, double lowest, double highest) {
  if (content.scalar_type() != ScalarType::Byte || content.dim() != 1 || !content.is_contiguous()) {
    refuse("content has shape ", shape_of(content), ": it must be the contiguous bytes of an answer, uint8");
  }
  const Limits limits{std::min(vocab_size, int64_t(1) << 31), at_most, lowest, highest};
  Reader reader(static_cast<const char*>(content.data_ptr()), content.numel(), limits);
  if (!reader.answer()) {
    return {tensor_of<int32_t>(content, {}, ScalarType::Int), tensor_of<float>(content, {}, ScalarType::Float),
            tensor_of<int64_t>(content, {}, ScalarType::Long)};
  }
  const std::vector<int64_t> cuts{
      reader.ids_cut.begin, reader.ids_cut.end, reader.tokens_cut.begin, reader.tokens_cut.end};
  return {tensor_of(content, reader.ids, ScalarType::Int), tensor_of(content, reader.logprobs, ScalarType::Float),
          tensor_of(content, cuts, ScalarType::Long)};
}
