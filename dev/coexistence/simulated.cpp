// A web service beside training on one network, packet by packet (ns-3): the setting of section 7
// of "Distributed Learning over Unreliable Networks" (Yu et al. 2019): 16 servers on links of 1
// Gbit/s behind one switch, training traffic of 2.4 Gbit/s in all, and messages of 100 KB between
// random servers that arrive as a Poisson process. Prints one JSON object; simulated.py runs the
// grid.
//
//     servers ── port ══ 1 Gbit/s ══ switch ── port ══ 1 Gbit/s ══ servers
//
// Every port, of servers and of the switch, is a queue of class port_queue below, which knows web
// packets from training packets by their DSCP. The ports of servers hold any number of web packets,
// since a kernel makes its own TCP wait and does not lose its packets; the switch holds --buffer.
//
// Web: a TCP connection for each message, as long as the message; its time runs from the arrival of
// the message until the last byte is received, connecting included.
// Training: both phases of an exchange among N owners (gradients to owners, parameters from them)
// send 1/N of the vector from each server to each other, so on the wire they look the same: every
// server sends to all others in turn. --burst 1 spreads that evenly (computing and sending
// overlap), --burst F sends F times as fast for 1/F of every step. Over UDP nobody sends again;
// over TCP (--reliable) everything arrives.
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <vector>
#include <algorithm>

#include "ns3/core-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"
#include "ns3/traffic-control-module.h"
#include "ns3/delay-jitter-estimation.h"

using namespace ns3;

static struct {
    uint32_t servers = 16;
    double link_gbps = 1;
    double delay_us = 10;       // of each of the two links between servers
    double training_gbps = 2.4; // of all servers together, IP headers included
    double messages = 5000;     // per second, of all servers together
    uint32_t message_bytes = 100000;
    double seconds = 1, warmup = 0.1; // messages that arrive in [warmup, warmup + seconds) count
    std::string order = "fifo";       // or priority: a port sends web packets first
    uint32_t buffer = 512;            // packets that a port of the switch holds
    uint32_t training_limit = 0; // a port that holds so many drops training packets; 0: --buffer
    double random_loss = 0;      // training packets that their sender drops, by coin flips
    bool reliable = false;
    double burst = 1, step_ms = 100;
    bool poisson =
        false;           // gaps between training packets are exponential, for comparison with M/D/1
    double rto_ms = 200; // least retransmission time-out; Linux: 200 ms
    uint32_t seed = 1;
} options;

static const uint32_t PACKET = 1500;                                        // bytes of IP
static const uint32_t UDP_PAYLOAD = PACKET - 28, TCP_PAYLOAD = PACKET - 52; // with timestamps
static const uint8_t TOS_TRAINING = 1 << 2; // DSCP 1, lower effort (RFC 8622)
static const uint16_t WEB = 80, TRAINING = 9;
static const double COOLDOWN = 0.05; // seconds

static struct {
    uint64_t sent, lost_at_random, received, received_bytes, sent_bytes; // training
    uint64_t dropped_training, dropped_web;                              // at ports
    double delay_sum;                // seconds, training over UDP
    std::vector<double> times;       // seconds, web
    uint64_t arrived, counted, slow; // web messages; slow: an initial or least time-out at least
} counts;

// A port's queue. Order fifo: one line, and who comes when it is training_limit long and trains is
// dropped; whoever comes when it is buffer long is dropped. Order priority: two lines, web first,
// each with its limit.
class port_queue : public QueueDisc {
  public:
    static TypeId GetTypeId() {
        static TypeId id =
            TypeId("port_queue")
                .SetParent<QueueDisc>()
                .AddConstructor<port_queue>()
                .AddAttribute("AtServer", "Holds any number of web packets", BooleanValue(false),
                              MakeBooleanAccessor(&port_queue::at_server), MakeBooleanChecker());
        return id;
    }
    port_queue() : QueueDisc(QueueDiscSizePolicy::MULTIPLE_QUEUES) {}

  private:
    bool at_server;

    bool DoEnqueue(Ptr<QueueDiscItem> item) override {
        uint8_t tos = 0;
        item->GetUint8Value(QueueItem::IP_DSFIELD, tos);
        bool training = (tos & 0xfc) == TOS_TRAINING;
        bool priority = options.order == "priority";
        Ptr<InternalQueue> line = GetInternalQueue(priority && training ? 1 : 0);
        bool full = training && !options.reliable
                        ? line->GetNPackets() >= options.training_limit
                        : !at_server && line->GetNPackets() >= options.buffer;
        if (full) {
            ++(training ? counts.dropped_training : counts.dropped_web);
            DropBeforeEnqueue(item, "full");
            return false;
        }
        return line->Enqueue(item);
    }
    Ptr<QueueDiscItem> DoDequeue() override {
        Ptr<QueueDiscItem> item = GetInternalQueue(0)->Dequeue();
        return item ? item : GetInternalQueue(1)->Dequeue();
    }
    bool CheckConfig() override {
        for (int i = 0; i < 2; ++i)
            AddInternalQueue(CreateObjectWithAttributes<DropTailQueue<QueueDiscItem>>(
                "MaxSize", QueueSizeValue(QueueSize("100000000p"))));
        return true;
    }
    void InitializeParams() override {}
};
NS_OBJECT_ENSURE_REGISTERED(port_queue);

// ---- the network --------------------------------------------------------------------------------

static NodeContainer hosts;
static std::vector<Ipv4Address> addresses;

static void build_network(void) {
    hosts.Create(options.servers);
    Ptr<Node> network_switch = CreateObject<Node>();
    NodeContainer all(hosts, NodeContainer(network_switch));
    InternetStackHelper().Install(all);
    PointToPointHelper link;
    link.SetDeviceAttribute("DataRate", DataRateValue(DataRate(uint64_t(options.link_gbps * 1e9))));
    // ns-3 counts 2 bytes of PPP where Ethernet has 38: header, checksum, preamble, gap.
    link.SetDeviceAttribute("InterframeGap",
                            TimeValue(Seconds(36 * 8 / (options.link_gbps * 1e9))));
    link.SetChannelAttribute("Delay", TimeValue(MicroSeconds(options.delay_us)));
    link.SetQueue("ns3::DropTailQueue", "MaxSize", StringValue("1p"));
    Ipv4AddressHelper networks("10.0.0.0", "255.255.255.252");
    for (uint32_t i = 0; i < options.servers; ++i) {
        NetDeviceContainer pair = link.Install(hosts.Get(i), network_switch);
        for (int at_server = 0; at_server < 2; ++at_server) {
            TrafficControlHelper port;
            port.SetRootQueueDisc("port_queue", "AtServer", BooleanValue(at_server));
            port.Install(pair.Get(!at_server));
        }
        addresses.push_back(networks.Assign(pair).GetAddress(0));
        networks.NewNetwork();
    }
    Ipv4GlobalRoutingHelper::PopulateRoutingTables();
}

static Ptr<Socket> open_socket(uint32_t host, bool tcp) {
    return Socket::CreateSocket(hosts.Get(host), tcp ? TcpSocketFactory::GetTypeId()
                                                     : UdpSocketFactory::GetTypeId());
}

// ---- training -----------------------------------------------------------------------------------

static Ptr<UniformRandomVariable> coin, jitter;
static std::vector<Ptr<Socket>> senders; // UDP: one per server; TCP: servers x servers
static std::vector<uint32_t> turns;      // packets sent so far, per server
static bool traffic_stopped;

// ns-3.37 takes the DSCP of what is sent from a peer's address, and later versions take it from the socket.
template <class Address> auto mark(Address &address, int) -> decltype(address.SetTos(0)) {
    address.SetTos(TOS_TRAINING);
}
template <class Address> void mark(Address &, ...) {}

static InetSocketAddress training_address(uint32_t peer) {
    InetSocketAddress address(addresses[peer], TRAINING);
    mark(address, 0);
    return address;
}

// Sends one packet to the next peer and plans the next packet.
static void send_training(uint32_t host) {
    if (traffic_stopped) return;
    uint32_t peers = options.servers - 1;
    uint32_t peer = (host + 1 + turns[host]++ % peers) % options.servers;
    if (options.reliable) {
        int done = senders[host * options.servers + peer]->Send(Create<Packet>(TCP_PAYLOAD));
        if (done > 0) ++counts.sent, counts.sent_bytes += done;
    } else {
        ++counts.sent;
        Ptr<Packet> packet = Create<Packet>(UDP_PAYLOAD);
        DelayJitterEstimation::PrepareTx(packet); // notes the time
        if (coin->GetValue() < options.random_loss)
            ++counts.lost_at_random;
        else
            senders[host]->SendTo(packet, 0, training_address(peer));
    }
    double gap = PACKET * 8 / (options.training_gbps * 1e9 / options.servers) / options.burst;
    gap *= options.poisson ? -std::log(1 - jitter->GetValue()) : 0.5 + jitter->GetValue();
    double step = options.step_ms * 1e-3, now = Simulator::Now().GetSeconds();
    double start = std::floor(now / step) * step;
    double next = now + gap;
    if (options.burst > 1 && next - start > step / options.burst) next = start + step + gap;
    Simulator::Schedule(Seconds(next - now), send_training, host);
}

static void receive_training(Ptr<Socket> socket) {
    while (Ptr<Packet> packet = socket->Recv()) {
        ++counts.received;
        counts.received_bytes += packet->GetSize();
        if (options.reliable) continue; // TCP cuts anew
        DelayJitterEstimation sent;
        sent.RecordRx(packet);
        counts.delay_sum += sent.GetLastDelay().GetSeconds();
    }
}

static void accept_training(Ptr<Socket> socket, const Address &) {
    socket->SetRecvCallback(MakeCallback(receive_training));
}

static void start_training(void) {
    for (uint32_t host = 0; host < options.servers; ++host) {
        Ptr<Socket> receiver = open_socket(host, options.reliable);
        receiver->SetIpTos(TOS_TRAINING); // of acknowledgements
        receiver->Bind(InetSocketAddress(Ipv4Address::GetAny(), TRAINING));
        receiver->SetRecvCallback(MakeCallback(receive_training));
        receiver->SetAcceptCallback(MakeNullCallback<bool, Ptr<Socket>, const Address &>(),
                                    MakeCallback(accept_training));
        if (options.reliable) receiver->Listen();
    }
    turns.resize(options.servers);
    for (uint32_t host = 0; host < options.servers; ++host) {
        for (uint32_t peer = 0; peer < (options.reliable ? options.servers : 1); ++peer) {
            senders.push_back(open_socket(host, options.reliable));
            senders.back()->SetIpTos(TOS_TRAINING);
            if (options.reliable && peer != host) senders.back()->Connect(training_address(peer));
        }
        // After 10 ms of connecting, each server at its own point of the rotation's period.
        Simulator::Schedule(Seconds(0.01 + 1e-4 * jitter->GetValue()), send_training, host);
    }
}

// ---- web ----------------------------------------------------------------------------------------

struct message {
    double start;
    uint32_t missing; // bytes
};
static std::map<std::pair<uint32_t, uint16_t>, message>
    messages; // by the sender's address and port
static Ptr<UniformRandomVariable> who;
static Ptr<ExponentialRandomVariable> arrivals;
static uint64_t open_messages; // of those that count

static double measured_until(void) {
    return options.warmup + options.seconds;
}

// New traffic ends shortly after the measured messages. Then what is on its way arrives.
static void finish_if_done(void) {
    if (traffic_stopped && open_messages == 0)
        Simulator::Stop(MilliSeconds(options.reliable ? 10000 : 50));
}

static void stop_traffic(void) {
    traffic_stopped = true;
    finish_if_done();
}

static bool counts_in(double start) {
    return start >= options.warmup && start < measured_until();
}

static void receive_web(std::pair<uint32_t, uint16_t> key, Ptr<Socket> socket) {
    while (Ptr<Packet> packet = socket->Recv()) {
        auto found = messages.find(key);
        if (found == messages.end()) continue;
        found->second.missing -= packet->GetSize();
        if (found->second.missing > 0) continue;
        double start = found->second.start, time = Simulator::Now().GetSeconds() - start;
        messages.erase(found);
        socket->Close();
        if (!counts_in(start)) continue;
        counts.times.push_back(time);
        counts.slow += time >= options.rto_ms * 1e-3;
        --open_messages;
        finish_if_done();
    }
}

static void accept_web(Ptr<Socket> socket, const Address &from) {
    InetSocketAddress peer = InetSocketAddress::ConvertFrom(from);
    socket->SetRecvCallback(
        MakeBoundCallback(receive_web, std::make_pair(peer.GetIpv4().Get(), peer.GetPort())));
}

static void send_web(Ptr<Socket> socket) {
    socket->Send(Create<Packet>(options.message_bytes));
    socket->Close(); // once everything is acknowledged
}

static void failed_web(Ptr<Socket>) {}

static void arrive_web(void) {
    if (traffic_stopped) return;
    uint32_t from = who->GetInteger(0, options.servers - 1);
    uint32_t to = (from + who->GetInteger(1, options.servers - 1)) % options.servers;
    Ptr<Socket> socket = open_socket(from, true);
    socket->SetConnectCallback(MakeCallback(send_web), MakeCallback(failed_web));
    socket->Connect(InetSocketAddress(addresses[to], WEB));
    Address local;
    socket->GetSockName(local);
    double now = Simulator::Now().GetSeconds();
    messages[{addresses[from].Get(), InetSocketAddress::ConvertFrom(local).GetPort()}] = {
        now, options.message_bytes};
    ++counts.arrived;
    if (counts_in(now)) ++counts.counted, ++open_messages;
    Simulator::Schedule(Seconds(arrivals->GetValue()), arrive_web);
}

static void start_web(void) {
    for (uint32_t host = 0; host < options.servers; ++host) {
        Ptr<Socket> listener = open_socket(host, true);
        listener->Bind(InetSocketAddress(Ipv4Address::GetAny(), WEB));
        listener->SetAcceptCallback(MakeNullCallback<bool, Ptr<Socket>, const Address &>(),
                                    MakeCallback(accept_web));
        listener->Listen();
    }
    Simulator::Schedule(Seconds(0.01 + arrivals->GetValue()), arrive_web);
}

// ---- a run --------------------------------------------------------------------------------------

static double percentile(double share) {
    if (counts.times.empty()) return 0;
    return counts.times[size_t(share * double(counts.times.size() - 1))];
}

static void print_result(void) {
    std::vector<double> &times = counts.times;
    std::sort(times.begin(), times.end());
    double sum = 0;
    for (double time : times) sum += time;
    uint64_t lost = counts.lost_at_random + counts.dropped_training;
    printf("{\"messages_counted\": %lu, \"finished\": %zu, \"mean_ms\": %.6f, \"median_ms\": %.6f, "
           "\"p99_ms\": %.6f, \"slow\": %lu, \"web_dropped\": %lu, ",
           counts.counted, times.size(), times.empty() ? 0 : sum * 1e3 / double(times.size()),
           percentile(0.5) * 1e3, percentile(0.99) * 1e3, counts.slow, counts.dropped_web);
    printf("\"training_sent\": %lu, \"training_received\": %lu, \"training_dropped\": %lu, "
           "\"training_sent_bytes\": %lu, \"training_received_bytes\": %lu, "
           "\"training_loss\": %.6f, \"training_delay_us\": %.4f, \"simulated_s\": %.4f}\n",
           counts.sent, counts.received, lost,
           counts.sent_bytes ? counts.sent_bytes : counts.sent * UDP_PAYLOAD, counts.received_bytes,
           options.reliable || !counts.sent ? 0 : double(lost) / double(counts.sent),
           counts.received ? counts.delay_sum * 1e6 / double(counts.received) : 0,
           Simulator::Now().GetSeconds());
}

static void read_options(int argc, char **argv) {
    CommandLine line;
    line.AddValue("servers", "servers behind the switch", options.servers);
    line.AddValue("link-gbps", "rate of every link", options.link_gbps);
    line.AddValue("delay-us", "of every link", options.delay_us);
    line.AddValue("training-gbps", "training traffic of all servers", options.training_gbps);
    line.AddValue("messages", "web messages per second, in all", options.messages);
    line.AddValue("message-bytes", "of a web message", options.message_bytes);
    line.AddValue("seconds", "in which messages are counted", options.seconds);
    line.AddValue("warmup", "seconds before that", options.warmup);
    line.AddValue("order", "fifo, or priority: web packets first", options.order);
    line.AddValue("buffer", "packets a port of the switch holds", options.buffer);
    line.AddValue("training-limit", "packets from which on training packets are dropped",
                  options.training_limit);
    line.AddValue("random-loss", "of training packets, by coin flips", options.random_loss);
    line.AddValue("reliable", "training over TCP", options.reliable);
    line.AddValue("burst", "training sends so much faster, and rests", options.burst);
    line.AddValue("step-ms", "period of bursts", options.step_ms);
    line.AddValue("poisson", "training packets leave at random", options.poisson);
    line.AddValue("rto-ms", "least retransmission time-out", options.rto_ms);
    line.AddValue("seed", "of everything random", options.seed);
    line.Parse(argc, argv);
    if (options.training_limit == 0) options.training_limit = options.buffer;
    const char *wrong = options.servers < 2                                      ? "servers"
                        : options.order != "fifo" && options.order != "priority" ? "order"
                        : options.burst < 1                                      ? "burst"
                        : options.training_limit > options.buffer                ? "training-limit"
                                                                                 : nullptr;
    if (wrong) {
        fprintf(stderr, "simulated: --%s is out of range, see --help\n", wrong);
        exit(2);
    }
}

int main(int argc, char **argv) {
    read_options(argc, argv);
    RngSeedManager::SetSeed(options.seed);
    coin = CreateObject<UniformRandomVariable>();
    jitter = CreateObject<UniformRandomVariable>();
    who = CreateObject<UniformRandomVariable>();
    arrivals = CreateObject<ExponentialRandomVariable>();
    if (options.messages > 0) arrivals->SetAttribute("Mean", DoubleValue(1 / options.messages));
    Config::SetDefault("ns3::TcpSocket::SegmentSize", UintegerValue(TCP_PAYLOAD));
    Config::SetDefault("ns3::TcpSocket::SndBufSize", UintegerValue(1 << 20));
    Config::SetDefault("ns3::TcpSocket::RcvBufSize", UintegerValue(1 << 20));
    Config::SetDefault("ns3::TcpSocket::ConnTimeout", TimeValue(Seconds(1))); // RFC 6298
    Config::SetDefault("ns3::TcpSocketBase::MinRto", TimeValue(MilliSeconds(options.rto_ms)));
    Config::SetDefault("ns3::TcpSocketBase::ClockGranularity", TimeValue(MicroSeconds(1)));
    Config::SetDefault("ns3::TcpSocketBase::MaxSegLifetime", DoubleValue(0.1));
    build_network();
    if (options.training_gbps > 0) Simulator::Schedule(Seconds(0), start_training);
    if (options.messages > 0) Simulator::Schedule(Seconds(0), start_web);
    Simulator::Schedule(Seconds(measured_until() + COOLDOWN), stop_traffic);
    Simulator::Stop(Seconds(measured_until() + 10)); // what is not through by then never will be
    Simulator::Run();
    print_result();
    Simulator::Destroy();
    return 0;
}
